"""What the benchmark compares with: other libraries for 4-bit weights, and fp16 without them.

Each peer makes one callable per copy of a weight of the given size; a call multiplies a fixed x. None is
needed: what is not installed, or refuses a size, is left out and said so.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

GROUP_SIZE = 128

# Peers beside torch: the module -> its package.
PACKAGES = {"humming": "humming-kernels", "gemlite": "gemlite"}


class PeerError(Exception):
    """The peer cannot run this; the message says why."""


class PeerMissingError(PeerError):
    """The peer is not installed, so it can run nothing."""


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    largest_m: int  # beyond it the peer is far off its purpose, and slow enough to hold up the run
    make: Callable[[Any, int, int, int, str], Callable[[int], list[Callable[[], Any]]]]
    # (torch, N, K, copies, dtype) -> (M -> callables)


def peers() -> list[Peer]:
    """All peers, those of torch first."""
    return [
        Peer("torch.mm", 2**31, _torch_mm),
        Peer("TinyGEMM", 16, _tinygemm),
        Peer("Humming", 2**31, _humming),
        Peer("GemLite", 64, _gemlite),
    ]


def versions() -> dict[str, str]:
    """Package -> version of the peers that are installed, those of torch left out."""
    installed = [package for module, package in PACKAGES.items() if _is_installed(module)]
    return {package: importlib.metadata.version(package) for package in installed}


def _torch_mm(torch: Any, N: int, K: int, copies: int, dtype: str):
    # A weight of 16 bits is four times as large: fewer copies get as far past the L2.
    weights = [torch.randn(N, K, device="cuda", dtype=getattr(torch, dtype)) for _ in range(max(2, copies // 3))]

    def calls(M: int):
        x = torch.randn(M, K, device="cuda", dtype=getattr(torch, dtype))
        return [lambda w=w: torch.mm(x, w.t()) for w in weights]

    return calls


def _tinygemm(torch: Any, N: int, K: int, copies: int, dtype: str):
    """bfloat16 whatever the dtype: it has nothing else."""
    if N % 8 or K % 1024:
        raise PeerError(f"needs N % 8 == 0 and K % 1024 == 0 without padding, got N={N} K={K}")
    weights = []
    for _ in range(copies):
        q = torch.randint(0, 256, (N, K // 2), device="cuda", dtype=torch.uint8)
        scales_and_zeros = torch.rand(K // GROUP_SIZE, N, 2, device="cuda", dtype=torch.bfloat16)
        weights.append((torch._convert_weight_to_int4pack(q, 8), scales_and_zeros))

    def calls(M: int):
        x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
        return [lambda q=q, s=s: torch._weight_int4pack_mm(x, q, GROUP_SIZE, s) for q, s in weights]

    return calls


def _humming(torch: Any, N: int, K: int, copies: int, dtype: str):
    _require("humming")
    from humming.layer import HummingLayer

    type_ = getattr(torch, dtype)
    config = {"dtype": "uint4", "group_size": GROUP_SIZE}
    layer = HummingLayer(shape_n=N, shape_k=K, weight_config=config, torch_dtype=type_).cuda()
    layer.load_from_unquantized(torch.randn(N, K, device="cuda", dtype=type_) / 50)
    layer.transform()
    layers = [layer, *(copy.deepcopy(layer) for _ in range(copies - 1))]

    def calls(M: int):
        x = torch.randn(M, K, device="cuda", dtype=type_)
        return [lambda layer=layer: layer(x) for layer in layers]

    return calls


def _gemlite(torch: Any, N: int, K: int, copies: int, dtype: str):
    _require("gemlite")
    from gemlite.helper import A16W4_HQQ_INT

    type_ = getattr(torch, dtype)
    make = A16W4_HQQ_INT(device="cuda", dtype=type_)
    layers = []
    for _ in range(copies):
        q = torch.randint(0, 16, (N, K), device="cuda", dtype=torch.uint8)
        groups = torch.rand(N, -(-K // GROUP_SIZE), device="cuda", dtype=type_)
        layers.append(make.from_weights(q, groups / 50, 8 * torch.ones_like(groups)))

    def calls(M: int):
        x = torch.randn(M, K, device="cuda", dtype=type_)
        return [lambda layer=layer: layer(x) for layer in layers]

    return calls


def _require(module: str) -> None:
    if not _is_installed(module):
        raise PeerMissingError(f"not installed: pip install {PACKAGES[module]}")


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None

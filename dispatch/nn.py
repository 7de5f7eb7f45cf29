"""torch modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gristmill import torch_adapter
from gristmill.errors import ArgumentError
from gristmill.packed_weight import PackedWeight
from gristmill.preloading import preload
from gristmill.torch_weights import dtype_name, pad_rows, to_torch, weight_of_tensors
from torch import Tensor
from torch.compiler import is_compiling


class W4A16Linear(torch.nn.Module):
    """A linear layer with a packed 4-bit weight, for inference; takes the place of `torch.nn.Linear`.

    Parameters
    ----------
    weight : of numpy arrays or torch tensors; its arrays become the buffers `qweight` (rows padded to 16 bytes),
        `scales`, `zero_points`, `bias` and `perm`

    Notes
    -----
    `.to(device)` loads every kernel that the layer can hit on that device. `.half()` and `.bfloat16()` convert scales,
    zero points and bias as they convert the parameters of other layers. torch.autocast casts an input of another dtype
    than the weight's, as it does for `nn.Linear`, and never the weight: autocast to another dtype is refused with the
    fix. An input that has the weight's dtype is left alone.
    """

    def __init__(self, weight: PackedWeight) -> None:
        super().__init__()
        on_host = to_torch(weight, "cpu") if not isinstance(weight.qweight, Tensor) else weight
        self.in_features = weight.K
        self.out_features = weight.N
        self.group_size = weight.group_size
        self.register_buffer("qweight", pad_rows(on_host.qweight))
        self.register_buffer("scales", on_host.scales)
        self.register_buffer("zero_points", on_host.zero_points)
        self.register_buffer("bias", on_host.bias)
        self.register_buffer("perm", on_host.perm)
        # The buffers with the weight that was made of them, in one: another thread sees both or neither.
        self._packed: tuple[tuple[Any, ...], PackedWeight] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features)."""
        if is_compiling():
            return torch.ops.gristmill.w4a16_linear(
                x, self.qweight, self.scales, self.zero_points, self.bias, self.perm,
                self.in_features, self.group_size,
            )  # fmt: skip
        return torch_adapter.linear(x, self.packed_weight())

    def packed_weight(self) -> PackedWeight:
        """The weight that the buffers hold now."""
        buffers = self._buffers
        qweight, scales, zero_points, bias, perm = found = (
            buffers["qweight"], buffers["scales"], buffers["zero_points"], buffers["bias"], buffers["perm"],
        )  # fmt: skip
        packed = self._packed
        if packed is not None:
            known, weight = packed
            if (
                qweight is known[0]
                and scales is known[1]
                and zero_points is known[2]
                and bias is known[3]
                and perm is known[4]
            ):
                return weight
        assert qweight is not None
        assert scales is not None
        weight = weight_of_tensors(qweight, scales, zero_points, bias, perm, self.in_features, self.group_size)
        self._packed = found, weight
        return weight

    def extra_repr(self) -> str:
        scales = self._buffers["scales"]
        parts = [
            f"in_features={self.in_features}",
            f"out_features={self.out_features}",
            f"group_size={self.group_size}",
            f"dtype={dtype_name(scales.dtype) if scales is not None else None}",
            *(f"{name}={self._buffers[name] is not None}" for name in ("zero_points", "bias", "perm")),
        ]
        return ", ".join(parts)

    def get_extra_state(self) -> Tensor:
        """What the buffers' shapes do not tell: K and the group size."""
        return torch.tensor([self.in_features, self.group_size])

    def set_extra_state(self, state: Tensor) -> None:
        K, group_size = (int(value) for value in state)
        if (K, group_size) != (self.in_features, self.group_size):
            raise ArgumentError(
                f"state_dict is of a layer with K={K} group_size={group_size}, "
                f"this one has K={self.in_features} group_size={self.group_size}"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> W4A16Linear:
        super()._apply(fn, recurse)
        self._packed = None
        qweight = self._buffers["qweight"]
        if qweight is not None and qweight.is_cuda:
            preload(self.packed_weight())
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}

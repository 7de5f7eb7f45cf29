"""Building packs: rows -> what the cache has, ninja for what it lacks -> packs on disk."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from gristmill.aot.cache import ObjectCache
from gristmill.aot.compiled_object import CompiledObject
from gristmill.aot.errors import BuildError
from gristmill.aot.ninja_graph import compile_batches, make_batches
from gristmill.aot.pack import make_manifest, write_pack
from gristmill.aot.sources import ROW_MODULES, Rows, object_key, read_rows
from gristmill.aot.targets import Target, find_target
from gristmill.aot.toolchain import BUILD_PACKAGES, require
from gristmill.manifest import Manifest


@dataclass(frozen=True, slots=True)
class PackReport:
    """What building one pack came to."""

    arch: str
    folder: Path
    entries: int
    objects: int
    object_bytes: int
    compiled: int  # entries compiled in this run; the rest came from the cache
    compile_seconds: float  # of processors, all processes together
    spilled: Mapping[str, int]  # entry whose kernel keeps registers in memory -> bytes per thread
    changed: bool  # whether the pack on disk is another than before


@dataclass(slots=True)
class _ArchBuild:
    target: Target
    rows: Rows
    keys: dict[str, str] = field(default_factory=dict)  # variant -> key
    compiled: dict[str, CompiledObject] = field(default_factory=dict)  # variant -> object
    missing: dict[str, str] = field(default_factory=dict)  # one variant of each key that the cache lacks -> key

    def load(self, cache: ObjectCache) -> None:
        by_key: dict[str, CompiledObject | None] = {}
        self.missing = {}
        for name, key in self.keys.items():
            if key not in by_key:
                by_key[key] = cache.load(key)
                if by_key[key] is None:
                    self.missing[name] = key
            found = by_key[key]
            if found is not None:
                self.compiled[name] = found


def build_packs(
    archs: Sequence[str],
    out: Path,
    cache_folder: Path,
    jobs: int,
    progress: IO[str],
    row_modules: Sequence[str] = ROW_MODULES,
) -> list[PackReport]:
    """Build the packs of `archs` below `out`; no pack is touched unless all of them can be built.

    Parameters
    ----------
    out : a pack is `out/<arch>`
    progress : gets a line for each batch compiled

    Raises
    ------
    BuildError : and its subclasses, for whatever keeps a pack from being complete
    """
    require(BUILD_PACKAGES, "building packs")
    report = _line_writer(progress)
    cache = ObjectCache(cache_folder, report)
    builds = []
    for arch in dict.fromkeys(archs):
        target = find_target(arch)
        rows = read_rows(arch, row_modules)
        build = _ArchBuild(target, rows, {variant.name: object_key(variant, target) for variant in rows.variants})
        build.load(cache)
        builds.append(build)
    lacking = {build.target.arch: dict(build.missing) for build in builds if build.missing}
    seconds: dict[str, float] = {}
    if lacking:
        batches = make_batches(lacking, jobs)
        count = sum(len(batch.variants) for batch in batches)
        report(f"compiling {count} variants in {len(batches)} batches, {jobs} at a time")
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gristmill-build-") as graph:
            seconds = compile_batches(batches, Path(graph), cache_folder, row_modules, jobs, progress)
        report(f"compiled {count} variants in {time.monotonic() - start:.1f} s")
    manifests = []
    for build in builds:
        if build.missing:
            build.load(cache)
        if build.missing:
            raise BuildError(f"the cache {cache_folder} does not keep what it was given: {', '.join(build.missing)}")
        manifests.append(make_manifest(build.target, build.rows, build.compiled))
    reports = []
    for build, manifest in zip(builds, manifests, strict=True):
        folder = out / build.target.arch
        changed = write_pack(folder, manifest, build.compiled)
        reports.append(_pack_report(folder, manifest, build, lacking.get(manifest.arch, {}), seconds, changed))
    return reports


def _pack_report(
    folder: Path,
    manifest: Manifest,
    build: _ArchBuild,
    lacked: dict[str, str],
    seconds: dict[str, float],
    changed: bool,
) -> PackReport:
    codes = {manifest.entries[name].object: result.code for name, result in build.compiled.items()}
    keys = set(lacked.values())
    return PackReport(
        arch=manifest.arch,
        folder=folder,
        entries=len(manifest.entries),
        objects=len(codes),
        object_bytes=sum(len(code) for code in codes.values()),
        compiled=sum(key in keys for key in build.keys.values()),
        compile_seconds=round(sum(seconds.get(f"{manifest.arch}/{name}", 0.0) for name in lacked), 1),
        spilled={
            name: entry.resources["spills"] for name, entry in manifest.entries.items() if entry.resources["spills"]
        },
        changed=changed,
    )


def _line_writer(progress: IO[str]) -> Callable[[str], None]:
    def report(line: str) -> None:
        progress.write(line + "\n")
        progress.flush()

    return report

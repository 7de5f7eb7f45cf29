"""From rows and compiled objects to a pack on disk: `manifest.json` and `objects/<sha256>.<kind>`.

The same rows and objects give the same bytes. A pack that would not change is left as it is, with its record
of verification; a pack that changes has none until it is verified again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import gristmill
from gristmill.aot.code_object import build_machine_folders, check_object, check_paths
from gristmill.aot.compiled_object import CompiledObject
from gristmill.aot.compilers import Variant, argument_layout, block, dynamic_shared_bytes, early_start, figures
from gristmill.aot.errors import BuildError, ObjectError
from gristmill.aot.sources import Rows, rows_digest, source_path
from gristmill.aot.targets import Target
from gristmill.errors import FormulaError, ManifestError
from gristmill.formula import Formula
from gristmill.manifest import Entry, Manifest, Needs, Rule
from gristmill.packs import MANIFEST_FILE, RECORDS_FILE, Pack


def make_manifest(target: Target, rows: Rows, compiled: Mapping[str, CompiledObject]) -> Manifest:
    """The manifest of `rows`, whose objects are `compiled` by variant name, checked by reading it back.

    Raises
    ------
    BuildError : a row does not make a valid entry, or the objects come from different compilers
    ObjectError : an object is not what its row says
    """
    compilers: dict[str, str] = {}
    entries = {}
    for variant in rows.variants:
        result = compiled[variant.name]
        for compiler, version in result.compilers.items():
            if compilers.setdefault(compiler, version) != version:
                raise BuildError(
                    f"{target.arch}: objects of {compiler} {compilers[compiler]} and {version} in one pack"
                )
        entries[variant.name] = _entry(target, variant, result)
    try:
        manifest = Manifest.of(
            entries.values(),
            tuple(Rule(Formula(row.when), row.variants, row.origin) for row in rows.policy),
            arch=target.arch,
            kind=target.kind,
            version=gristmill.__version__,
            compilers=compilers,
            source_digest=rows_digest(rows),
        )
        data = manifest.dump()
        parsed = Manifest.parse(data, f"manifest of {target.arch}")
    except (FormulaError, ManifestError) as error:
        raise BuildError(f"{target.arch}: {error}") from None
    if parsed.dump() != data:
        raise BuildError(f"{target.arch}: the manifest does not survive being read and written")
    check_paths(data, f"the manifest of {target.arch}", build_machine_folders())
    return parsed


def write_pack(folder: Path, manifest: Manifest, compiled: Mapping[str, CompiledObject]) -> bool:
    """Write the pack to `folder`, replacing what is there; False when it was there already, byte for byte.

    The new pack is complete before the old one goes; between two renames there is none.

    Raises
    ------
    BuildError : the folder cannot be written, or another build writes it at the same time
    """
    objects = {manifest.entries[name].object: result.code for name, result in compiled.items()}
    data = manifest.dump()
    if _is_same(folder, manifest, data, objects):
        return False
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{folder.name}-"
        with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as temporary:
            new, old = Path(temporary) / "new", Path(temporary) / "old"
            (new / "objects").mkdir(parents=True)
            for digest, code in sorted(objects.items()):
                _write(new / "objects" / f"{digest}.{manifest.kind}", code)
            _write(new / MANIFEST_FILE, data)
            _replace(folder, new, old)
    except OSError as error:
        raise BuildError(f"cannot write the pack {folder}: {error}; if another build writes it, build again") from None
    return True


def check_pack(folder: Path) -> Pack:
    """Open the pack in `folder` and check all of it: each object whole and for its arch, no other file.

    Raises
    ------
    PackError : the manifest or an object is missing or damaged
    ObjectError : an object is not what its entry says, or a file does not belong
    """
    pack = Pack.open(folder)
    manifest = pack.manifest
    if folder.name != manifest.arch:
        raise ObjectError(f"{folder} holds the pack of {manifest.arch}")
    if not manifest.entries:
        raise ObjectError(f"{folder}: the pack has no entries")
    for entry in manifest.entries.values():
        code = pack.read_object(entry)
        target = Target(manifest.arch, "", "", 32, manifest.kind)
        check_object(code, target, entry.symbol, entry.arguments, entry.block[0] * entry.block[1] * entry.block[2])
    expected = {f"objects/{entry.object}.{manifest.kind}" for entry in manifest.entries.values()}
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    extra = found - expected - {MANIFEST_FILE, RECORDS_FILE}
    if extra:
        raise ObjectError(f"{folder}: files that no entry names: {', '.join(sorted(extra))}")
    return pack


def _entry(target: Target, variant: Variant, result: CompiledObject) -> Entry:
    arguments = argument_layout(variant)
    try:
        facts = check_object(result.code, target, result.symbol, arguments, result.threads)
        conditions = tuple(Formula(text) for text in variant.conditions)
        x, y, z = (Formula(text) for text in variant.grid)
    except ObjectError as error:
        raise ObjectError(f"{target.arch}: {variant.name}: {error}") from None
    except FormulaError as error:
        raise BuildError(f"{target.arch}: {variant.name}: {error}") from None
    return Entry(
        name=variant.name,
        op=variant.op,
        symbol=result.symbol,
        object=hashlib.sha256(result.code).hexdigest(),
        source=source_path(variant),
        arguments=arguments,
        grid=(x, y, z),
        block=block(variant, result),
        static_shared_bytes=facts.static_shared_bytes,
        dynamic_shared_bytes=Formula(dynamic_shared_bytes(variant, result)),
        needs=Needs(variant.dtype, variant.zero_points, conditions),
        roundings=variant.roundings,
        weights_in_dtype=variant.weights_in_dtype,
        resources={**facts.resources, **figures(variant)},
        early_start=early_start(variant),
    )


def _replace(folder: Path, new: Path, old: Path) -> None:
    """Move `folder` to `old` and `new` to its place; who is stopped between the two moves it back."""
    try:
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)


def _is_same(folder: Path, manifest: Manifest, data: bytes, objects: Mapping[str, bytes]) -> bool:
    wanted = {f"{digest}.{manifest.kind}": code for digest, code in objects.items()}
    try:
        if (folder / MANIFEST_FILE).read_bytes() != data:
            return False
        if {path.name for path in (folder / "objects").iterdir()} != wanted.keys():
            return False
        return all((folder / "objects" / name).read_bytes() == code for name, code in wanted.items())
    except OSError:
        return False


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        os.fchmod(file.fileno(), 0o644)
        file.flush()
        os.fsync(file.fileno())

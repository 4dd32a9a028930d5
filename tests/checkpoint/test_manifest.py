"""The manifest against itself: round trip, every kind of damage, and a fuzz of single mutations."""

import json
import random
from dataclasses import replace

import pytest

from megatron_parm.checkpoint.manifest import (
    FORMAT_VERSION,
    SELF_HASH,
    FileEntry,
    Manifest,
    Part,
    TensorEntry,
    fingerprint,
    manifest_text,
    parse_manifest,
)
from megatron_parm.errors import CheckpointError, UntrustedCheckpointError

SHARD = "shard-00001-model-00001-of-00001.safetensors"
MUTANTS = 800


def _manifest() -> Manifest:
    parts = (Part(SHARD, (0, 0), (2, 3)), Part(SHARD, (2, 0), (2, 3)))
    return Manifest(
        iteration=120,
        save_id="0123456789abcdef",
        layout={"world": 2, "tp": 2},
        versions={"megatron_parm": "0.1.0", "torch": "2.13.0"},
        tensors={
            "decoder.layers.0.weight": TensorEntry((4, 3), "float32", parts),
            "step": TensorEntry((), "int64", (Part(SHARD, (), ()),)),
        },
        rank_tensors={"rank_00000.random": TensorEntry((5,), "uint8", (Part(SHARD, (0,), (5,)),))},
        files={SHARD: FileEntry(1000, "ab" * 32), "state.json": FileEntry(31, "cd" * 32)},
    )


def _rehashed(content: dict[str, object]) -> bytes:
    """What a careful attacker or a foreign program would write: changed content with a matching hash."""
    content.pop(SELF_HASH)
    return json.dumps(content | {SELF_HASH: fingerprint(content)}).encode()  # type: ignore[arg-type]


def test_round_trip() -> None:
    assert parse_manifest(manifest_text(_manifest()).encode(), "m") == _manifest()


def test_any_mutation_gives_the_original_or_our_error() -> None:
    """Reference: the unmutated manifest."""
    original = manifest_text(_manifest()).encode()
    draw = random.Random(5)
    refused = 0
    for _ in range(MUTANTS):
        data = bytearray(original)
        place = draw.randrange(len(data))
        kind = draw.randrange(5)
        if kind == 0:
            data[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[place] = draw.randrange(256)
        elif kind == 2:
            del data[place : place + draw.randrange(1, 20)]
        elif kind == 3:
            data[place:place] = bytes(draw.choices(b'0123456789-.e"{}[],:/\\ \n\x00\xff', k=draw.randrange(1, 4)))
        else:
            data = data[:place]
        try:
            assert parse_manifest(bytes(data), "m") == _manifest()
        except CheckpointError:
            refused += 1
    assert refused > MUTANTS * 0.9  # the fuzz does reach what it means to reach


def test_any_changed_value_gives_our_error_though_the_hash_matches() -> None:
    """A foreign writer can make the hash right; every single value replaced by one of another kind."""

    def places(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]

    original = json.loads(manifest_text(_manifest()))
    for *parents, last in places(original)[1:]:
        for foreign in (None, "x", -1, 1.5, True, [], {}, [[]], {"x": 1}):
            content = json.loads(manifest_text(_manifest()))
            inner = content
            for key in parents:
                inner = inner[key]
            inner[last] = foreign
            try:
                parse_manifest(_rehashed(content), "m")  # some changes are as good as the original
            except CheckpointError:
                continue


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"format_version": 1}',
        b"[" * 100_000,
        b'{"format_version": "1"}',
        b"\xff\xfe",
        b"9" * 5000,
    ],
    ids=["empty", "null", "list", "no-version", "no-hash", "deep", "text-version", "not-utf8", "huge-number"],
)
def test_what_is_no_manifest_is_refused_with_its_path(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="/where/manifest"):
        parse_manifest(data, "/where/manifest.json")


def test_a_newer_format_says_which_version_is_needed() -> None:
    content = json.loads(manifest_text(_manifest()))
    content |= {"format_version": FORMAT_VERSION + 1, "versions": {"megatron_parm": "7.5.0"}, "tensors": "another form"}
    with pytest.raises(CheckpointError, match=r"format 2; .* Install megatron_parm 7\.5\.0 or newer"):
        parse_manifest(_rehashed(content), "m")


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a/b", "..", ".hidden", "", "a\\b", "a\n", "a\x00b"])
def test_a_file_name_that_leads_out_of_the_folder_is_untrusted(name: str) -> None:
    content = json.loads(manifest_text(_manifest()))
    content["files"][name] = {"bytes": 1, "sha256": "00"}
    with pytest.raises(UntrustedCheckpointError, match="lead out of its folder"):
        parse_manifest(_rehashed(content), "m")


def test_parts_must_fill_their_tensor_and_lie_in_listed_files() -> None:
    manifest = _manifest()
    whole = manifest.tensors["decoder.layers.0.weight"]
    first, second = whole.parts
    for parts in (
        (first,),
        (first, replace(second, offsets=(3, 0))),
        (first, replace(second, offsets=(-1, 0))),
        (first, replace(second, file="other.safetensors")),
        (first, replace(second, offsets=(2,), shape=(6,))),
    ):
        bad = replace(manifest, tensors={"w": replace(whole, parts=parts)})
        with pytest.raises(CheckpointError, match=r"do not make up the tensor w \[4, 3\] float32"):
            parse_manifest(manifest_text(bad).encode(), "m")


def test_an_unknown_dtype_is_refused() -> None:
    bad = replace(_manifest(), tensors={"w": TensorEntry((), "float8", (Part(SHARD, (), ()),))})
    with pytest.raises(CheckpointError, match="w"):
        parse_manifest(manifest_text(bad).encode(), "m")

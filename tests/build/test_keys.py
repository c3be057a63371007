"""Would catch: C++ and the written specification (docs/internals/keys.md) disagreeing on a space or a key.

This is the specification once more, in Python and from the document alone: an engine in any language can name KV so.
"""

import hashlib
import struct
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# tag, type, name; types: u = u32, d = IEEE-754 double, t = text, h = digest, a = adapters
FIELDS = [
    (1, "u", "key_format"),
    (2, "h", "weights"),
    (3, "t", "engine"),
    (4, "u", "engine_state_version"),
    (5, "t", "engine_build"),
    (6, "t", "kv_dtype_k"),
    (7, "t", "kv_dtype_v"),
    (8, "u", "layers"),
    (9, "u", "kv_heads"),
    (10, "u", "head_size"),
    (11, "u", "head_size_v"),
    (12, "t", "layout"),
    (13, "t", "attention"),
    (14, "t", "rope_type"),
    (15, "d", "rope_freq_base"),
    (16, "d", "rope_freq_scale"),
    (17, "d", "rope_ext_factor"),
    (18, "d", "rope_attn_factor"),
    (19, "d", "rope_beta_fast"),
    (20, "d", "rope_beta_slow"),
    (21, "u", "rope_orig_context"),
    (22, "a", "adapters"),
    (23, "u", "tp_size"),
    (24, "u", "tp_rank"),
    (25, "u", "pp_size"),
    (26, "u", "pp_rank"),
    (27, "u", "kv_group"),
    (28, "u", "chunk_tokens"),
    (29, "t", "salt"),
]

BASE = {
    "key_format": 1,
    "weights": bytes(range(32)),
    "engine": "llama.cpp",
    "engine_state_version": 4,
    "engine_build": "b11434",
    "kv_dtype_k": "f16",
    "kv_dtype_v": "f16",
    "layers": 30,
    "kv_heads": 3,
    "head_size": 64,
    "head_size_v": 64,
    "layout": "llama.seq/v-transposed",
    "attention": "full",
    "rope_type": "norm",
    "rope_freq_base": 100000.0,
    "rope_freq_scale": 1.0,
    "rope_ext_factor": 0.0,
    "rope_attn_factor": 1.0,
    "rope_beta_fast": 32.0,
    "rope_beta_slow": 1.0,
    "rope_orig_context": 8192,
    "adapters": [],
    "tp_size": 1,
    "tp_rank": 0,
    "pp_size": 1,
    "pp_rank": 0,
    "kv_group": 0,
    "chunk_tokens": 256,
    "salt": "",
}


def encode_space(fields: dict) -> bytes:
    out = b"terrace.space"
    for tag, kind, name in FIELDS:
        value = fields[name]
        if kind == "u":
            data = struct.pack("<I", value)
        elif kind == "d":
            data = struct.pack("<d", value + 0.0)
        elif kind == "h":
            data = value
        elif kind == "a":
            data = b"".join(digest + struct.pack("<d", scale) for digest, scale in value)
        else:
            data = value.encode()
        if kind in "ta" and not data:
            continue
        out += struct.pack("<I", tag) + kind.encode() + struct.pack("<I", len(data)) + data
    return out


def space_id(fields: dict) -> bytes:
    return hashlib.sha256(encode_space(fields)).digest()


def keys(fields: dict, tokens: list[int], media: list[tuple[int, int, bytes]] = ()) -> list[bytes]:
    chunk, parent, out = fields["chunk_tokens"], space_id(fields), []
    for begin in range(0, len(tokens) // chunk * chunk, chunk):
        part = tokens[begin : begin + chunk]
        spans = b""
        count = 0
        for position, length, identity in media:
            start = max(begin, position)
            if start < min(begin + chunk, position + length):
                spans += struct.pack("<III", start - begin, start - position, len(identity)) + identity
                count += 1
        message = (
            b"terrace.key.1" + parent + struct.pack(f"<I{chunk}i", chunk, *part) + struct.pack("<I", count) + spans
        )
        parent = hashlib.sha256(message).digest()
        out.append(parent)
    return out


def vectors() -> dict[str, str]:
    tokens = list(range(1, 513))
    return {
        "space.base": space_id(BASE).hex(),
        "space.salt": space_id({**BASE, "salt": "tenant-7"}).hex(),
        "space.adapter": space_id({**BASE, "adapters": [(bytes(range(32)), 0.5)]}).hex(),
        "keys.1to512": " ".join(k.hex() for k in keys(BASE, tokens)),
        "keys.media": " ".join(k.hex() for k in keys(BASE, tokens, [(200, 100, b"img-1")])),
    }


def test_the_specification_gives_the_published_vectors():
    lines = (ROOT / "tests/data/keys.txt").read_text().splitlines()
    published = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    assert published == vectors()


def test_the_document_prints_the_published_vectors():
    document = (ROOT / "docs/internals/keys.md").read_text()
    for name, value in vectors().items():
        assert name in document
        for digest in value.split():
            assert digest in document, name

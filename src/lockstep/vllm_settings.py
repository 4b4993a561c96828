"""vLLM's settings that are not Lockstep's: what each one is about here, and the values at which it asks for what Lockstep does anyway.

Knows names and values, as keyword arguments (`tensor_parallel_size`) and as flags (`--tensor-parallel-size`, `-tp`); does not know Lockstep's own
settings, argument parsers, or what a setting of vLLM does there. The rule is that of request fields: nothing is ignored in silence. A value that asks
for what happens anyway passes; any other is refused with a sentence that says what to do instead; a name that nobody knows gets the nearest one.

Names and defaults: vLLM's `EngineArgs` and `vllm serve --help`, releases 0.5 to 0.25.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lockstep.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class ForeignSetting:
    """reason: what it is about, and what to use instead. switch: it is on or off. neutral: values at which it asks for what Lockstep does anyway;
    None and empty containers always do."""

    reason: str
    switch: bool = False
    neutral: tuple[object, ...] = ()

    def asks_for_nothing(self, value: object) -> bool:
        """value: as Python code gives it, or the text of a flag's value."""
        text = str(value).strip().lower()
        return text in ("none", "{}", "[]", "()") or any(_same(text, str(known).lower()) for known in self.neutral)


def _same(text: str, known: str) -> bool:
    try:
        return text == known or float(text) == float(known)
    except ValueError:
        return False


_TENSOR = "tensor parallelism is not there yet; use --pipeline-parallel-size"
_DATA = "data parallelism is not there yet; start one server a replica"
_CONTEXT = "context parallelism is not there; use --pipeline-parallel-size"
_EXPERTS = "mixtures of experts are not spread over ranks; use --pipeline-parallel-size"
_HOSTS = "stages on other hosts are not there yet"
_ADAPTERS = "adapters are not there yet; merge the adapter into the weights and load those"
_SPECULATIVE = "speculative decoding is not there yet; leave it out, tokens are the same without it"
_TRANSFER = "prefill/decode disaggregation is not there yet"
_MEDIA = "Lockstep takes text; images, audio and video are not there"
_POOLING = "Lockstep runs models that generate text, not pooling models"
_QUANTISED = "GGUF files bring their own; other quantisation is not there yet"
_KV_DTYPE = "scales of KV are of each token and head, all layers alike; use --kv-cache-dtype"
_OFFLOAD = "weights and KV stay in memory; nothing is swapped or offloaded. Use --kv-cache-memory-bytes for the size of the KV cache"
_GRAPHS = "the native backend runs a recorded program; there is nothing to compile or capture"
_KERNELS = "the backend picks its kernels; use --backend or --instruction-set"
_REMOTE = "Lockstep never runs code that comes with a model"
_FORMAT = "the kind of a checkpoint is told from its files"
_CONFIG = "what config.json says is what runs; change the file in a copy of the folder"
_TOKENIZER = "the tokenizer is read from the model, or from --tokenizer"
_TEMPLATE = "the template is the tokenizer's; name another tokenizer folder with --tokenizer"
_TOOLS = "tool calls are not there yet"
_REASONING = "reasoning parsers are not there yet"
_EMBEDS = "prompt embeddings are not there yet"
_LOGITS = "a request names no code; load classes with --logits-processors, and requests ask for them by vllm_xargs"
_STRUCTURE = "structured outputs are always there, by llguidance; what is asked of them comes with the request"
_LOGPROBS = "log probabilities are of the unfiltered distribution at temperature 1"
_CHUNKS = "prefill is always chunked, to --max-num-batched-tokens a step"
_SCHEDULER = "the scheduler has no such rule; use --max-num-seqs, --max-num-batched-tokens and --queue-max"
_PREEMPTION = "a preempted request is computed again, with the same tokens"
_PREFIX = "prefix-cache keys are keyed BLAKE2b hashes; use --enable-prefix-caching"
_MAMBA = "models with recurrent state are not there yet"
_LOGS = "figures are at /metrics, and a request is a line with --access-log"
_TRACES = "traces are not there yet; figures are at /metrics"
_PLUGINS = "there is no such plugin point"
_SLEEP = "an engine cannot be put to sleep; stop it"
_UPDATES = "weights cannot be replaced while the engine runs yet; start another one"
_EXECUTOR = "stages are started by --distributed-executor-backend mp or local"
_HTTP = "the HTTP server has no such setting; put a proxy before it"
_SERVER = "it belongs to `lockstep serve`"


def _valued(reason: str, names: str) -> Iterator[tuple[str, ForeignSetting]]:
    return ((name, ForeignSetting(reason)) for name in names.split())


def _switches(reason: str, names: str) -> Iterator[tuple[str, ForeignSetting]]:
    return ((name, ForeignSetting(reason, switch=True, neutral=(False,))) for name in names.split())


def _except(reason: str, name: str, *neutral: object) -> Iterator[tuple[str, ForeignSetting]]:
    """One that some other value than "off" and "nothing" leaves as it is."""
    yield name, ForeignSetting(reason, switch=any(isinstance(value, bool) for value in neutral), neutral=neutral)


FOREIGN: Mapping[str, ForeignSetting] = MappingProxyType(
    dict(
        pair
        for part in (
            # Where the model runs.
            _except(_TENSOR, "tensor_parallel_size", 1),
            _except(_TENSOR, "disable_custom_all_reduce", True, False),
            _except(_DATA, "data_parallel_size", 1),
            _except(_DATA, "api_server_count", 1),
            _valued(_DATA, "data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port"),
            _valued(_DATA, "data_parallel_backend dp_sync_interval ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold"),
            _switches(_DATA, "data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb enable_dbo"),
            _switches(_DATA, "disable_nccl_for_dp_synchronization"),
            _except(_CONTEXT, "decode_context_parallel_size", 1),
            _except(_CONTEXT, "prefill_context_parallel_size", 1),
            _valued(_CONTEXT, "cp_kv_cache_interleave_size dcp_kv_cache_interleave_size dcp_comm_backend"),
            _switches(_CONTEXT, "dcp_q_replicate"),
            _switches(_EXPERTS, "enable_expert_parallel enable_eplb enable_elastic_ep enable_ep_weight_filter enable_return_routed_experts"),
            _valued(_EXPERTS, "eplb_config expert_placement_strategy all2all_backend elastic_ep_max_dp_size moe_backend"),
            _except(_HOSTS, "nnodes", 1),
            _except(_HOSTS, "node_rank", 0),
            _valued(_HOSTS, "master_addr master_port distributed_timeout_seconds cpu_distributed_timeout_seconds"),
            _switches(_HOSTS, "headless"),
            _except("this engine runs on CPUs", "device", "auto", "cpu"),
            _valued("this engine runs on CPUs", "device_ids"),
            _valued("this engine runs on CPUs; use --kv-cache-memory-bytes", "gpu_memory_utilization"),
            _switches("threads are not bound; start the engine under numactl", "numa_bind"),
            _valued("threads are not bound; start the engine under numactl", "numa_bind_nodes numa_bind_cpus"),
            _valued(_EXECUTOR, "worker_cls worker_extension_cls max_parallel_loading_workers"),
            _switches(_EXECUTOR, "worker_use_ray ray_workers_use_nsight"),
            # Memory.
            _except(_OFFLOAD, "cpu_offload_gb", 0),
            _except(_OFFLOAD, "swap_space", 0),
            _except(_OFFLOAD, "kv_offloading_size", 0),
            _valued(_OFFLOAD, "offload_backend cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step offload_params"),
            _valued(_OFFLOAD, "kv_offloading_backend"),
            _valued(_KV_DTYPE, "kv_cache_dtype_skip_layers"),
            _switches(_KV_DTYPE, "calculate_kv_scales kv_sharing_fast_prefill"),
            _valued(_PREFIX, "prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit"),
            _switches("windows of attention are the model's", "disable_sliding_window"),
            _switches("every KV group has its own blocks", "disable_hybrid_kv_cache_manager"),
            _switches(_SLEEP, "enable_sleep_mode enable_cumem_allocator enable_nccl_comm_suspend"),
            _valued(_SLEEP, "sleep_preserve_parameter_names"),
            _valued(_UPDATES, "weight_transfer_config"),
            # Which model, and how it is read.
            _except(_FORMAT, "load_format", "auto"),
            _except(_FORMAT, "config_format", "auto"),
            _valued(_FORMAT, "model_loader_extra_config ignore_patterns safetensors_load_strategy pt_load_map_location model_weights"),
            _valued(_FORMAT, "safetensors_prefetch_num_threads safetensors_prefetch_block_size"),
            _switches(_REMOTE, "trust_remote_code"),
            _valued(_REMOTE, "code_revision model_class_overrides"),
            _except(_REMOTE, "model_impl", "auto"),
            _valued(_CONFIG, "hf_overrides hf_config_path rope_scaling rope_theta"),
            _except(_TOKENIZER, "tokenizer_mode", "auto", "hf"),
            _switches(_TOKENIZER, "skip_tokenizer_init"),
            _except("texts are encoded in the server's process", "tokenizer_pool_size", 0),
            _valued("texts are encoded in the server's process", "tokenizer_pool_type tokenizer_pool_extra_config"),
            _except("texts are encoded in the server's process", "renderer_num_workers", 1),
            _valued(_QUANTISED, "quantization quantization_config qlora_adapter_name_or_path"),
            _switches(_QUANTISED, "allow_deprecated_quantization"),
            _except(_POOLING, "runner", "auto", "generate"),
            _except(_POOLING, "convert", "auto", "none"),
            _except(_POOLING, "task", "auto", "generate"),
            _valued(_POOLING, "pooler_config override_pooler_config"),
            _switches(_ADAPTERS, "enable_lora enable_lora_bias fully_sharded_loras enable_prompt_adapter enable_tower_connector_lora"),
            _switches(_ADAPTERS, "specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras"),
            _valued(_ADAPTERS, "max_loras max_lora_rank max_cpu_loras lora_dtype lora_extra_vocab_size lora_target_modules lora_modules"),
            _valued(_ADAPTERS, "long_lora_scaling_factors default_mm_loras max_lora_cls_labels max_prompt_adapters max_prompt_adapter_token"),
            _switches(_MEDIA, "enable_mm_embeds interleave_mm_strings mm_encoder_only skip_mm_profiling disable_mm_preprocessor_cache"),
            _switches(_MEDIA, "disable_chunked_mm_input enable_mm_processor_stats"),
            _except(_MEDIA, "language_model_only", True, False),
            _valued(_MEDIA, "limit_mm_per_prompt media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type"),
            _valued(_MEDIA, "mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_processor_device"),
            _valued(_MEDIA, "mm_hasher_algorithm mm_tensor_ipc video_pruning_rate allowed_local_media_path allowed_media_domains"),
            _valued(_MEDIA, "ec_transfer_config io_processor_plugin"),
            # How it computes.
            _except(_GRAPHS, "enforce_eager", True, False),
            _except(_GRAPHS, "compilation_config", 0),
            _except(_GRAPHS, "optimization_level", 0),
            _valued(_GRAPHS, "cudagraph_capture_sizes max_cudagraph_capture_size max_seq_len_to_capture performance_mode kernel_config"),
            _switches(_GRAPHS, "cudagraph_metrics enable_layerwise_nvtx_tracing enable_flashinfer_autotune"),
            _valued(_KERNELS, "attention_backend attention_config linear_backend ir_op_priority override_attention_dtype"),
            _except(_KERNELS, "disable_cascade_attn", True),
            _valued(_MAMBA, "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode mamba_backend mamba_config"),
            # How it schedules.
            _except(_CHUNKS, "enable_chunked_prefill", True),
            _except(_SCHEDULER, "num_scheduler_steps", 1),
            _except(_SCHEDULER, "scheduler_delay_factor", 0),
            _except(_SCHEDULER, "stream_interval", 1),
            _valued(_SCHEDULER, "max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold scheduler_cls num_lookahead_slots"),
            _valued(_SCHEDULER, "max_num_scheduled_tokens max_num_active_seqs max_num_queued_reqs max_num_queued_tokens watermark"),
            _switches(_SCHEDULER, "scheduler_reserve_full_isl multi_step_stream_outputs"),
            _except(_PREEMPTION, "preemption_mode", "recompute"),
            _valued(_SPECULATIVE, "speculative_config speculative_model num_speculative_tokens speculative_draft_tensor_parallel_size"),
            _valued(
                _SPECULATIVE, "ngram_prompt_lookup_max ngram_prompt_lookup_min spec_decoding_acceptance_method spec_method spec_model spec_tokens"
            ),
            _valued(_SPECULATIVE, "speculative_max_model_len speculative_disable_by_batch_size per_request_spec_decode_metrics"),
            _valued(_TRANSFER, "kv_transfer_config kv_events_config"),
            # What requests may ask for.
            _switches(_EMBEDS, "enable_prompt_embeds"),
            _valued(_LOGITS, "logits_processor_pattern"),
            _valued(_STRUCTURE, "guided_decoding_backend structured_outputs_config"),
            _except(_LOGPROBS, "logprobs_mode", "raw_logprobs"),
            _except("at most 20 alternatives a token can be asked for", "max_logprobs", 20),
            _valued(_REASONING, "reasoning_parser reasoning_parser_plugin reasoning_config"),
            _switches(_REASONING, "enable_reasoning"),
            _valued(_TOOLS, "tool_call_parser tool_parser_plugin tool_server"),
            _switches(_TOOLS, "enable_auto_tool_choice exclude_tools_when_tool_choice_none"),
            _valued(_TEMPLATE, "chat_template default_chat_template_kwargs"),
            _except(_TEMPLATE, "chat_template_content_format", "auto", "string"),
            _switches(_TEMPLATE, "trust_request_chat_template"),
            _except("answers are the assistant's", "response_role", "assistant"),
            # What is told of it.
            _except(_LOGS, "disable_log_stats", True),
            _except(_LOGS, "disable_log_requests", True),
            _except(_LOGS, "disable_uvicorn_access_log", True),
            _except(_LOGS, "enable_log_requests", False),
            _switches(_LOGS, "aggregate_engine_logging enable_log_outputs enable_log_deltas log_error_stack enable_logging_iteration_details"),
            _valued(_LOGS, "max_log_len log_config_file log_level logging_config uvicorn_log_level disable_access_log_for_endpoints"),
            _switches(_LOGS, "kv_cache_metrics enable_mfu_metrics enable_server_load_tracking enable_per_request_metrics"),
            _valued(_LOGS, "kv_cache_metrics_sample custom_histogram_buckets show_hidden_metrics_for_version"),
            _valued(_TRACES, "otlp_traces_endpoint collect_detailed_traces profiler_config"),
            _valued(_PLUGINS, "additional_config middleware"),
            # HTTP.
            _except(_HTTP, "enable_prompt_tokens_details", True),
            _switches(_HTTP, "enable_force_include_usage enable_tokenizer_info_endpoint tokens_only grpc enable_request_id_headers"),
            _switches(_HTTP, "allow_credentials enable_ssl_refresh enable_offline_docs"),
            _except(_HTTP, "disable_fastapi_docs", True),
            _valued(_HTTP, "root_path ssl_ca_certs ssl_ciphers allowed_methods allowed_headers h11_max_incomplete_event_size h11_max_header_count"),
            _except(_HTTP, "ssl_cert_reqs", 0),
            _except("the fingerprint names weights, dtype and numerics", "fingerprint_mode", "full"),
            _valued("the fingerprint names weights, dtype and numerics", "fingerprint_value"),
            _valued(_SERVER, "served_model_name"),
        )
        for pair in part
    )
)
"""By keyword. A command or a config that has a setting of its own by one of these names looks there first."""

SHORT: Mapping[str, str] = MappingProxyType(
    {
        "-tp": "tensor_parallel_size",
        "-dp": "data_parallel_size",
        "-dpn": "data_parallel_rank",
        "-dpr": "data_parallel_start_rank",
        "-dpl": "data_parallel_size_local",
        "-dpa": "data_parallel_address",
        "-dpp": "data_parallel_rpc_port",
        "-dpb": "data_parallel_backend",
        "-dph": "data_parallel_hybrid_lb",
        "-dpe": "data_parallel_external_lb",
        "-dcp": "decode_context_parallel_size",
        "-pcp": "prefill_context_parallel_size",
        "-ep": "enable_expert_parallel",
        "-asc": "api_server_count",
        "-n": "nnodes",
        "-r": "node_rank",
        "-q": "quantization",
        "-O": "compilation_config",
        "-cc": "compilation_config",
        "-ac": "attention_config",
        "-sc": "speculative_config",
    }
)
"""vLLM's short flags."""

GLUED = ("-O",)
"""Short flags whose value may follow without a space: -O3."""


def own_settings(settings: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Those of `settings` that are in `known`; those of vLLM's that ask for what Lockstep does anyway are left out. Raises UnsupportedError for one
    that asks for something else, TypeError naming the nearest name for one that nobody knows."""
    own = {}
    for name, value in settings.items():
        if name in known:
            own[name] = value
        elif name not in FOREIGN:
            raise TypeError(f"unexpected setting {name!r}{nearest(name, (*known, *FOREIGN))}")
        elif not FOREIGN[name].asks_for_nothing(value):
            raise UnsupportedError(f"{name}={value!r:.80}: {FOREIGN[name].reason}")
    return own


def nearest(name: str, names: Collection[str]) -> str:
    """Words that name the one of `names` that is most like it, or none if none is."""
    close = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""

"""Settings of the engine and of the server: frozen, checked against one another, and free of torch.

Field names are vLLM's flags where vLLM has them. Every error says what to change.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chairlift.cores import CAN_BIND, parse_cores, usable
from chairlift.scheduling.config import POLICIES, PREEMPTION_MODES, VICTIM_RULES

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
ATTENTION_BACKENDS = ("auto", "reference", "cpu")
KV_CACHE_DTYPES = ("auto", "int8")
QUANTIZATIONS = ("int8",)
BATCHING = ("continuous", "static")
TOOL_CALL_PARSERS = ("hermes", "llama3_json", "mistral")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
GIB = 1024**3
# Beyond these lies what tensors, threads and timers cannot do.
MAX_COUNT = 2**31 - 1
MAX_BYTES = 2**60
MAX_THREADS = 1024
MAX_SECONDS = 86_400


class ConfigError(ValueError):
    """Settings that cannot work. The message says what to change."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What to load, on what, and how much of it the engine may use.

    Attributes:
        model: a built-in name ("smollm2"), a hub id, a directory, or a ``.gguf`` file.
        revision: branch, tag or commit of a hub id.
        dtype: precision of weights and activations; "auto" takes bfloat16 where the device computes in it, else
            float32.
        quantization: "int8" computes products in int8, with a scale for each output channel of the weights and one for
            each row of activations; ``None`` computes in ``dtype``. CPU only.
        kv_cache_dtype: precision of cached keys and values: "auto" takes the model's, "int8" a byte each, with a scale
            for each token and head.
        device: "auto" takes CUDA where there is one.
        max_model_len: longest sequence in tokens; ``None`` takes the model's own.
        block_size: tokens in a KV block.
        gpu_memory_utilization: share of the device's memory to use for weights and KV together; on the CPU, of the
            memory that is really available, container limits included. ``None`` takes 0.90 on CUDA, 0.50 on the CPU.
        kv_cache_memory_bytes: bytes of KV cache, of all ranks together, instead of a share.
        swap_space: GiB of host memory for swapped KV blocks, of all ranks together.
        max_num_seqs: most sequences in a step.
        max_num_batched_tokens: most token rows in a step; ``None`` takes the device's default.
        tensor_parallel_size: ranks that share the model, each a process with its part of every layer: on the CPU with
            its part of ``num_threads``, else with a GPU of its own.
        enforce_eager: run without captured graphs.
        attention_backend: "auto" takes the fastest that the device has.
        num_threads: CPU compute threads; ``None`` takes one for each core this process may use, or that
            ``cpu_threads_bind`` names.
        cpu_threads_bind: cores that compute threads are bound to, one each, the thread that runs steps to the first:
            "0-3,8", or "auto" for all that this process may use. ``None`` leaves them to the system.
        enable_prefix_caching: compute equal beginnings of prompts once.
        scheduling_policy: "fcfs", or "priority": lower values first.
        preemption_mode, preemption_victim, admission_reserve, max_num_partial_prefills, long_prefill_token_threshold:
            see :class:`~chairlift.scheduling.config.SchedulerConfig`.
        batching: "continuous" decides the batch at every step; "static" fills one and keeps it to its end.
        static_batch_size, static_batch_timeout: sequences in a static batch, and seconds to wait for it to fill.
        step_log: file that gets a line of JSON for each step.
        seed: of the seeds that are drawn for requests without one; ``None`` draws it from the system.
        step_timeout: seconds without a finished step, while there is work, after which the engine counts as wedged; a
            server then kills it and starts another.
    """

    model: str = "smollm2"
    revision: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    swap_space: float = 0.0
    max_num_seqs: int = 128
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    attention_backend: str = "auto"
    num_threads: int | None = None
    cpu_threads_bind: str | None = None
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    preemption_mode: str = "auto"
    preemption_victim: str = "latest"
    admission_reserve: bool = False
    max_num_partial_prefills: int = 1
    long_prefill_token_threshold: int | None = None
    batching: str = "continuous"
    static_batch_size: int = 8
    static_batch_timeout: float = 0.1
    step_log: str | None = None
    seed: int | None = None
    step_timeout: float = 60.0

    def __post_init__(self) -> None:
        _one_of("--dtype", self.dtype, DTYPES)
        if self.quantization is not None:
            _one_of("--quantization", self.quantization, QUANTIZATIONS)
        _one_of("--kv-cache-dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _one_of("--device", self.device, DEVICES)
        _one_of("--attention-backend", self.attention_backend, ATTENTION_BACKENDS)
        _count("--max-model-len", self.max_model_len)
        _count("--max-num-seqs", self.max_num_seqs)
        _count("--max-num-batched-tokens", self.max_num_batched_tokens)
        _count("--kv-cache-memory-bytes", self.kv_cache_memory_bytes, most=MAX_BYTES)
        _count("--num-threads", self.num_threads, most=MAX_THREADS)
        self._check_cores()
        if self.num_threads is not None and self.num_threads > (cores := available_cores()):
            raise ConfigError(
                f"--num-threads {self.num_threads} is more than the {cores} cores that this process may use, and "
                f"threads that share a core wait for one another in every step; give {cores} or less"
            )
        _count("--block-size", self.block_size)
        if not 0 < self.step_timeout <= MAX_SECONDS:
            raise ConfigError(
                f"--step-timeout must be above 0 and at most {MAX_SECONDS} seconds, got {self.step_timeout}"
            )
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"--gpu-memory-utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"--block-size must be a power of two, got {self.block_size}")
        if not 0 <= self.swap_space <= MAX_BYTES / GIB:
            raise ConfigError(f"--swap-space must be from 0 to {MAX_BYTES // GIB} GiB, got {self.swap_space}")
        _one_of("--batching", self.batching, BATCHING)
        _one_of("--scheduling-policy", self.scheduling_policy, POLICIES)
        _one_of("--preemption-mode", self.preemption_mode, PREEMPTION_MODES)
        _one_of("--preemption-victim", self.preemption_victim, VICTIM_RULES)
        _count("--max-num-partial-prefills", self.max_num_partial_prefills)
        _count("--long-prefill-token-threshold", self.long_prefill_token_threshold)
        if self.preemption_mode == "swap" and not self.swap_space:
            raise ConfigError("--preemption-mode swap needs room on the host: set --swap-space to some GiB")
        _count("--static-batch-size", self.static_batch_size)
        if not 0 <= self.static_batch_timeout <= MAX_SECONDS:
            raise ConfigError(
                f"--static-batch-timeout must be from 0 to {MAX_SECONDS} seconds, got {self.static_batch_timeout}"
            )
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least --max-num-seqs "
                f"({self.max_num_seqs}), or a full batch could not decode one token each; raise the first or lower "
                "the second"
            )
        _count("--tensor-parallel-size", self.tensor_parallel_size)
        if self.tensor_parallel_size > 1 and self.quantization is not None:
            raise ConfigError(
                f"--quantization {self.quantization} runs on one rank alone; leave it out, or use "
                "--tensor-parallel-size 1"
            )

    @property
    def bound_cores(self) -> tuple[int, ...]:
        """The cores of ``cpu_threads_bind``; none where it is not given.

        Raises:
            ValueError: they cannot be had.
        """
        return () if self.cpu_threads_bind is None else parse_cores(self.cpu_threads_bind)

    def _check_cores(self) -> None:
        if self.cpu_threads_bind is None:
            return
        if not CAN_BIND:
            raise ConfigError("--cpu-threads-bind needs Linux: this system binds no threads to cores; leave it out")
        try:
            cores = self.bound_cores
        except ValueError as error:
            raise ConfigError(f"--cpu-threads-bind {self.cpu_threads_bind}: {error}") from error
        if self.num_threads is not None and self.num_threads > len(cores):
            raise ConfigError(
                f"--cpu-threads-bind {self.cpu_threads_bind} has {len(cores)} cores for {self.num_threads} threads; "
                "name as many, or lower --num-threads"
            )
        if self.tensor_parallel_size != 1:
            raise ConfigError("--cpu-threads-bind binds the threads of one rank alone; leave it out, or use one rank")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How the HTTP server answers.

    Attributes:
        api_keys: any of these opens the API; none opens it to everybody.
        ssl_keyfile, ssl_certfile: PEM files of the server's key and certificate chain; both or neither.
        ssl_ca_certs: PEM file of authorities; clients are asked for a certificate that one of them signed.
        ssl_cert_reqs: 0 asks clients for no certificate, 1 checks the one that is offered, 2 insists on one. ``None``
            takes 2 where there are ``ssl_ca_certs``, else 0.
        allowed_origins: web pages from these origins may use the API ("*" for all); none may by default.
        allowed_methods, allowed_headers: what such pages may send.
        allow_credentials: whether browsers may send cookies and client certificates along.
        root_path: path under which a proxy shows the server, such as ``/llm``.
        max_body_size: bytes of the largest request body.
        max_num_queued_reqs: most sequences that may wait for a place.
        request_timeout: seconds from a request's head to the end of its answer; ``None`` for any time.
        shutdown_timeout: seconds that open requests get to end once the server is told to stop.
        log_format: "text" for people, "json" for a line of JSON each.
        log_level: of what is logged, the least.
        enable_log_requests: log a line for each request when it has ended.
        otlp_traces_endpoint: URL to which traces are sent, by OTLP over HTTP.
        tool_call_parser: how the model writes calls of tools; ``None`` finds out from its chat template.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""
    max_body_size: int = 4 * 1024**2
    max_num_queued_reqs: int = 1024
    request_timeout: float | None = None
    shutdown_timeout: float = 30.0
    log_format: str = "text"
    log_level: str = "info"
    enable_log_requests: bool = False
    otlp_traces_endpoint: str | None = None
    tool_call_parser: str | None = None

    def __post_init__(self) -> None:
        if not all(self.api_keys):
            raise ConfigError("--api-key must not be empty: it would let everybody in")
        self._check_tls()
        self._check_paths()
        _count("--max-body-size", self.max_body_size)
        if not 0 <= self.max_num_queued_reqs <= MAX_COUNT:
            raise ConfigError(f"--max-num-queued-reqs must be from 0 to {MAX_COUNT}, got {self.max_num_queued_reqs}")
        if self.request_timeout is not None and not 0 < self.request_timeout <= MAX_SECONDS:
            raise ConfigError(
                f"--request-timeout must be above 0 and at most {MAX_SECONDS} seconds, got {self.request_timeout}"
            )
        if not 0 <= self.shutdown_timeout <= MAX_SECONDS:
            raise ConfigError(
                f"--shutdown-timeout must be from 0 to {MAX_SECONDS} seconds, got {self.shutdown_timeout}"
            )
        _one_of("--log-format", self.log_format, LOG_FORMATS)
        _one_of("--log-level", self.log_level, LOG_LEVELS)
        if self.tool_call_parser is not None:
            _one_of("--tool-call-parser", self.tool_call_parser, TOOL_CALL_PARSERS)

    def _check_tls(self) -> None:
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            given, missing = "--ssl-keyfile", "--ssl-certfile"
            if self.ssl_certfile:
                given, missing = missing, given
            raise ConfigError(f"{given} needs {missing} too: TLS takes a key and its certificate")
        if self.ssl_ca_certs and not self.ssl_certfile:
            raise ConfigError(
                "--ssl-ca-certs needs --ssl-certfile and --ssl-keyfile too: without TLS there are no certificates"
            )
        if self.ssl_cert_reqs not in (None, 0, 1, 2):
            raise ConfigError(f"--ssl-cert-reqs must be 0, 1 or 2; got {self.ssl_cert_reqs}")
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ConfigError(
                "--ssl-cert-reqs needs --ssl-ca-certs: the authorities that clients' certificates are held to"
            )

    def _check_paths(self) -> None:
        if self.root_path and not (self.root_path.startswith("/") and not self.root_path.endswith("/")):
            raise ConfigError(
                f"--root-path must begin with / and not end with it, such as /llm; got {self.root_path!r}"
            )
        if self.allow_credentials and (not self.allowed_origins or "*" in self.allowed_origins):
            raise ConfigError(
                "--allow-credentials needs --allowed-origins that are named: with * any page could use them"
            )
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"--otlp-traces-endpoint must be the URL of an OTLP collector over HTTP, such as "
                f"http://localhost:4318/v1/traces; got {endpoint!r}"
            )


def available_cores() -> int:
    """CPU cores that this process may use: its affinity mask, not what the machine has."""
    return usable()


def _one_of(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{flag} must be one of {', '.join(choices)}; got {value!r}")


def _count(flag: str, value: int | None, most: int = MAX_COUNT) -> None:
    if value is not None and not (isinstance(value, int) and 1 <= value <= most):
        raise ConfigError(f"{flag} must be a whole number from 1 to {most}, got {value}")

"""The one error type of kvatlas, and the codes it carries.

A refusal is part of the interface: a scheduler retries on some, a peer is told
others, a test asserts them. So each has a stable `Code`, and each message says
the rule, what was got, and what to do.
"""

from __future__ import annotations

from enum import StrEnum


class Code(StrEnum):
    """Every reason for which kvatlas refuses. Codes are never renamed or reused.

    >>> Code("overlap") is Code.OVERLAP
    True
    """

    UNKNOWN_AXIS = "unknown_axis"
    BAD_AXES = "bad_axes"
    BAD_ORDER = "bad_order"
    NOT_AN_INTEGER = "not_an_integer"
    BAD_SIZE = "bad_size"
    NEGATIVE = "negative"
    OVERFLOW = "overflow"
    OUT_OF_RANGE = "out_of_range"
    OUT_OF_BOUNDS = "out_of_bounds"
    OVERLAP = "overlap"
    UNDECIDED = "undecided"
    TOO_MANY = "too_many"
    HOLE = "hole"
    MISALIGNED = "misaligned"
    NOT_DIVISIBLE = "not_divisible"
    NOT_FOLDABLE = "not_foldable"
    NOT_CONTIGUOUS = "not_contiguous"
    SPLIT_ELEMENT = "split_element"
    UNLIKE_PLACEMENTS = "unlike_placements"
    UNKNOWN_DTYPE = "unknown_dtype"
    NOT_REPRESENTABLE = "not_representable"
    UNKNOWN_FIELD = "unknown_field"
    BAD_FIELD = "bad_field"
    PAGE_TOO_SMALL = "page_too_small"
    PADDING_INSIDE_PAGE = "padding_inside_page"
    BAD_TENSOR = "bad_tensor"
    BAD_RANK = "bad_rank"
    TP_HEADS = "tp_heads"
    TP_WHOLE = "tp_whole"
    BAD_SPEC = "bad_spec"
    NO_CACHE = "no_cache"
    UNREADABLE = "unreadable"
    BAD_CONFIG = "bad_config"
    MISSING_KEY = "missing_key"
    UNKNOWN_ARCHITECTURE = "unknown_architecture"
    UNKNOWN_MODEL = "unknown_model"
    NO_HUB = "no_hub"
    UNKNOWN_ENGINE = "unknown_engine"
    UNKNOWN_BACKEND = "unknown_backend"
    BACKEND_REFUSES = "backend_refuses"
    BAD_TOPOLOGY = "bad_topology"
    LAYOUT_REFUSED = "layout_refused"
    PAGES_NOT_UNIFIED = "pages_not_unified"
    NOT_ENOUGH_MEMORY = "not_enough_memory"
    BAD_PACK = "bad_pack"
    BAD_PLAN = "bad_plan"
    UNKNOWN_POLICY = "unknown_policy"
    UNKNOWN_LAYER = "unknown_layer"
    BAD_QUANTITY = "bad_quantity"
    UNLIKE_MODELS = "unlike_models"
    UNLIKE_LAYERS = "unlike_layers"
    UNLIKE_DTYPES = "unlike_dtypes"
    MISSING_LAYERS = "missing_layers"
    NOT_A_SOURCE = "not_a_source"
    BAD_TOKENS = "bad_tokens"
    MISSING_BLOCKS = "missing_blocks"
    TWICE = "twice"
    DEADLINE = "deadline"
    PEER_LOST = "peer_lost"
    WIRE_FAILED = "wire_failed"
    BAD_HANDSHAKE = "bad_handshake"
    BAD_SIGNATURE = "bad_signature"
    UNLIKE_VERSIONS = "unlike_versions"
    UNKNOWN_SESSION = "unknown_session"
    UNKNOWN_REQUEST = "unknown_request"
    LEASE_EXPIRED = "lease_expired"
    CHECKSUM = "checksum"
    CANCELLED = "cancelled"
    MISSING_EXTRA = "missing_extra"
    NO_BLOCKS = "no_blocks"
    ENGINE_REFUSES = "engine_refuses"
    CANNOT_TAKE_BACK = "cannot_take_back"
    WRONG_DEVICE = "wrong_device"
    NO_KERNEL = "no_kernel"


class AtlasError(ValueError):
    """A refusal: the rule that was broken, what was got, and a remedy.

    >>> from kvatlas import Layout
    >>> try:
    ...     Layout("LBNHH")
    ... except AtlasError as refusal:
    ...     print(refusal.code, refusal.got)
    ...     print(refusal)  # doctest: +NORMALIZE_WHITESPACE
    bad_order 'LBNHH'
    A layout names each of L, B, H, N, C exactly once. Got 'LBNHH'.
    Write an order such as 'LBNHC', or one of the aliases NHD and HND. [bad_order]
    """

    def __init__(self, code: Code, rule: str, *, got: object, hint: str) -> None:
        self.code = code
        self.rule = rule
        self.got = got
        self.hint = hint
        super().__init__(f"{rule}. Got {got}. {hint}. [{code}]")

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call __init__ with the message alone.
        return (_rebuild, (self.code, self.rule, self.got, self.hint))


def _rebuild(code: Code, rule: str, got: object, hint: str) -> AtlasError:
    return AtlasError(code, rule, got=got, hint=hint)

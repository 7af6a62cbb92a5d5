"""`AtlasError`, the error type of kvatlas, and its codes.

Errors are part of the interface: schedulers retry on some, nodes send some to their peers,
and tests assert them. Each error therefore has a stable `Code` and a message in three
parts: the problem, the value received, and a hint on how to fix it.
"""

from __future__ import annotations

from enum import StrEnum


class Code(StrEnum):
    """The stable codes of `AtlasError`, each with a default description. Codes are never renamed.

    >>> Code("overlap") is Code.OVERLAP, Code.OVERLAP.problem
    (True, 'Two parts or two coordinates share bytes')
    """

    problem: str

    def __new__(cls, value: str, problem: str) -> Code:
        """Create a member with code `value` and default description `problem`."""
        code = str.__new__(cls, value)
        code._value_, code.problem = value, problem
        return code

    UNKNOWN_AXIS = "unknown_axis", "There is no such axis"
    BAD_AXES = "bad_axes", "Axis names are missing or repeated, or an axis lacks a size or a stride"
    BAD_ORDER = "bad_order", "A layout must name each of L, B, H, N, C exactly once"
    NOT_AN_INTEGER = "not_an_integer", "A size, stride, offset, index or id must be an integer"
    BAD_SIZE = "bad_size", "A size must be at least 1"
    NEGATIVE = "negative", "A size, offset or stride must not be negative"
    OVERFLOW = "overflow", "An address exceeds 2**63 - 1"
    OUT_OF_RANGE = "out_of_range", "A coordinate, id or slot is out of range"
    OUT_OF_BOUNDS = "out_of_bounds", "A byte range extends outside the buffer"
    OVERLAP = "overlap", "Two parts or two coordinates share bytes"
    UNDECIDED = "undecided", "The overlap check exceeded its search limit"
    TOO_MANY = "too_many", "A count exceeds the limit"
    HOLE = "hole", "Some bytes belong to no part and are not declared as padding"
    MISALIGNED = "misaligned", "A part, page or block does not start at a multiple of the alignment"
    NOT_DIVISIBLE = "not_divisible", "A size is not a multiple of another size that must divide it"
    NOT_FOLDABLE = (
        "not_foldable",
        "The two axes cannot be folded into one because they are not contiguous",
    )
    NOT_CONTIGUOUS = "not_contiguous", "Bytes that must be contiguous have gaps in this layout"
    SPLIT_ELEMENT = "split_element", "The bytes of one element are not contiguous"
    UNLIKE_PLACEMENTS = (
        "unlike_placements",
        "The two placements have different axes, sizes or items",
    )
    UNKNOWN_DTYPE = "unknown_dtype", "There is no such dtype"
    NOT_REPRESENTABLE = "not_representable", "The dtype cannot represent this value"
    UNKNOWN_FIELD = "unknown_field", "The page has no such field"
    BAD_FIELD = "bad_field", "The axes and the sharding of a field are inconsistent"
    PAGE_TOO_SMALL = "page_too_small", "The page is too small for its cells"
    PADDING_INSIDE_PAGE = (
        "padding_inside_page",
        "A page with padding must be contiguous, and this layout splits it",
    )
    FIELDS_APART = (
        "fields_apart",
        "The fields of a layer are stored apart, and this operation needs whole pages",
    )
    BAD_TENSOR = "bad_tensor", "A tensor has the wrong shape, dtype or strides"
    BAD_RANK = "bad_rank", "There is no such rank"
    TP_HEADS = (
        "tp_heads",
        "Heads or groups can be neither divided nor replicated evenly over the ranks",
    )
    TP_WHOLE = "tp_whole", "A field that can be neither sharded nor replicated requires tp 1"
    BAD_SPEC = "bad_spec", "The spec of a layer is invalid"
    NO_CACHE = "no_cache", "There is nothing to cache"
    UNREADABLE = "unreadable", "The file cannot be read, or its content is invalid"
    UNWRITABLE = "unwritable", "The file cannot be written"
    BAD_CONFIG = "bad_config", "A config value has the wrong type, length or range"
    MISSING_KEY = "missing_key", "The config lacks a key that its architecture requires"
    UNKNOWN_ARCHITECTURE = "unknown_architecture", "The architecture is unknown"
    UNKNOWN_MODEL = "unknown_model", "There is no model of this name"
    NO_HUB = "no_hub", "The model hub cannot be reached"
    UNKNOWN_ENGINE = "unknown_engine", "There is no such engine"
    UNKNOWN_BACKEND = (
        "unknown_backend",
        "There is no such backend, or no layer of the model uses it",
    )
    BACKEND_REFUSES = (
        "backend_refuses",
        "The backend does not support this block size or cache dtype",
    )
    BAD_TOPOLOGY = "bad_topology", "Heads, groups or layers cannot be divided evenly over the ranks"
    LAYOUT_REFUSED = "layout_refused", "Some layers or backends do not support this layout"
    PAGES_NOT_UNIFIED = (
        "pages_not_unified",
        "Pages of different layers cannot be padded to the same size",
    )
    NOT_ENOUGH_MEMORY = "not_enough_memory", "There is not enough memory"
    TOO_MANY_FILES = "too_many_files", "The process or the host cannot open another file or socket"
    UNKNOWN_GPU = "unknown_gpu", "There is no GPU of this name"
    WEIGHTS_TOO_LARGE = "weights_too_large", "The weights leave no memory for a cache"
    CONTRADICTORY = "contradictory", "Two options contradict each other"
    BAD_PACK = "bad_pack", "The model does not support this pack size"
    BAD_PLAN = "bad_plan", "The plan is invalid"
    BAD_EXCHANGE = "bad_exchange", "The document of the exchange format is invalid"
    NOT_CANONICAL = "not_canonical", "The JSON is not in its canonical form"
    UNKNOWN_POLICY = "unknown_policy", "There is no such policy"
    UNKNOWN_LAYER = "unknown_layer", "The plan has no such layer"
    BAD_QUANTITY = "bad_quantity", "The value is not a number with an optional unit"
    UNLIKE_MODELS = "unlike_models", "The two plans are for different models"
    UNLIKE_LAYERS = "unlike_layers", "A layer caches different content in the two plans"
    UNLIKE_DTYPES = "unlike_dtypes", "A layer is stored in different dtypes in the two plans"
    BAD_CONVERSION = (
        "bad_conversion",
        "The requested conversion does not match the two plans",
    )
    CANNOT_CONVERT = "cannot_convert", "The content of a layer cannot be converted"
    MISSING_SCALES = (
        "missing_scales",
        "The format needs one scale for the whole tensor, and none was given",
    )
    UNLIKE_CONVERSIONS = (
        "unlike_conversions",
        "The source and the destination request different conversions",
    )
    MISSING_LAYERS = "missing_layers", "One plan has layers that are missing from the other"
    NOT_A_SOURCE = "not_a_source", "The source rank does not hold the requested data"
    BAD_TOKENS = "bad_tokens", "The token range is reversed or exceeds the maximum length"
    MISSING_BLOCKS = "missing_blocks", "A block table is missing or does not cover all tokens"
    TWICE = "twice", "A block id is given twice"
    DEADLINE = "deadline", "The deadline passed"
    PEER_LOST = "peer_lost", "The peer disconnected"
    WIRE_FAILED = "wire_failed", "The transport failed"
    BAD_HANDSHAKE = "bad_handshake", "The peer sent a malformed or contradictory message"
    BAD_SIGNATURE = "bad_signature", "The two ends do not share the same secret"
    BAD_SECRET = "bad_secret", "A shared secret must be a bytes object of at least 16 bytes"
    UNPROTECTED = "unprotected", "A node without a secret would accept connections from any host"
    FORBIDDEN = "forbidden", "The peer may not do this"
    BUSY = "busy", "The peer is busy"
    UNLIKE_VERSIONS = "unlike_versions", "The peer uses an incompatible protocol version"
    UNKNOWN_SESSION = "unknown_session", "The session does not exist or has ended"
    CONCURRENT_CALLS = "concurrent_calls", "Two calls of one object overlap"
    UNKNOWN_REQUEST = "unknown_request", "The request is neither offered nor expected"
    BLOCKS_IN_USE = "blocks_in_use", "The node already uses some of these blocks"
    DIFFERENT_IDENTITY = (
        "different_identity",
        "The two ends compute their caches with different weights or settings",
    )
    LEASE_EXPIRED = "lease_expired", "The lease has expired or does not exist"
    BUFFERS_RECLAIMED = (
        "buffers_reclaimed",
        "The staging buffers of the transfer were given to another peer",
    )
    CHECKSUM = "checksum", "The received bytes do not match their checksums"
    CANCELLED = "cancelled", "The transfer was cancelled"
    ROW_UNREADABLE = "row_unreadable", "An encrypted row cannot be read without its tenant's key"
    MISSING_EXTRA = "missing_extra", "A required library is not installed"
    BAD_TRACE = "bad_trace", "The trace is inconsistent or in an unknown format"
    NO_BLOCKS = "no_blocks", "The pool does not have enough free blocks"
    ENGINE_REFUSES = "engine_refuses", "The engine's layers, masks or padding are not supported"
    CANNOT_TAKE_BACK = (
        "cannot_take_back",
        "The cache cannot be cropped: it no longer holds the states of earlier tokens",
    )
    WRONG_DEVICE = (
        "wrong_device",
        "Tensors are on different devices, or the kernel cannot access their device",
    )
    NO_KERNEL = "no_kernel", "There is no kernel for this case"


LONGEST_TEXT = 1_000
"""Maximum length of each part of a message, in characters."""


class AtlasError(ValueError):
    """An error with a stable code, a problem, the value received and a hint.

    If `problem` is empty, the default text of the code is used. Each part is cut to
    `LONGEST_TEXT` characters, because the value received may come from an untrusted peer.

    >>> from kvatlas import Layout
    >>> try:
    ...     Layout("LBNHH")
    ... except AtlasError as error:
    ...     print(error.code, error.got)
    ...     print(error)  # doctest: +NORMALIZE_WHITESPACE
    bad_order 'LBNHH'
    A layout must name each of L, B, H, N, C exactly once. Got 'LBNHH'.
    Write an order such as 'LBNHC', or one of the aliases NHD and HND. [bad_order]
    """

    def __init__(self, code: Code, problem: str = "", *, got: object, hint: str) -> None:
        self.code = code
        self.problem = _cut(problem) or code.problem
        text = str(got)
        self.got = _cut(text) if len(text) > LONGEST_TEXT else got
        self.hint = _cut(hint)
        end = "" if hint.endswith("?") else "."
        super().__init__(f"{self.problem}. Got {self.got}. {self.hint}{end} [{code}]")

    def __reduce__(self) -> tuple[object, ...]:
        # The default implementation would call __init__ with only the message.
        return (_rebuild, (self.code, self.problem, self.got, self.hint))


def _cut(text: str) -> str:
    """Cut `text` to at most `LONGEST_TEXT` characters; a cut text ends with its original length."""
    if len(text) <= LONGEST_TEXT:
        return text
    ending = f"... ({len(text):,} characters)"
    return text[: LONGEST_TEXT - len(ending)] + ending


def _rebuild(code: Code, problem: str, got: object, hint: str) -> AtlasError:
    return AtlasError(code, problem, got=got, hint=hint)


class MissingExtraError(AtlasError, ImportError):
    """The error for an optional library that is not installed.

    The hint names the extra of kvatlas to install, and ends with `note`.
    """

    def __init__(self, library: str, extra: str, note: str = "") -> None:
        super().__init__(
            Code.MISSING_EXTRA,
            f"{library} is not installed",
            got=f"no module {library}",
            hint=f"Try: pip install 'kvatlas[{extra}]'{note}",
        )
        self.library, self.extra, self.note = library, extra, note

    def __reduce__(self) -> tuple[object, ...]:
        return (MissingExtraError, (self.library, self.extra, self.note))

"""The paths of the server, and the JSON of its requests and answers.

Each type of a key has a meaning, `Annotated[str, "name of the bundle"]`. docs/protocol.md is made
of these declarations, and the tests compare them with what the server reads and answers.
"""

from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

Datatype = Literal[
    "BOOL",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "FP16",
    "FP32",
    "FP64",
    "BYTES",
]


class ScoreRequest(TypedDict):
    """A request of `/v1/score`."""

    context: NotRequired[Annotated[dict[str, Any], "values that all candidates share, by column"]]
    candidates: Annotated[
        list[dict[str, Any]] | dict[str, list[Any]],
        "columns of each candidate, or a list of values by column",
    ]


class Scores(TypedDict):
    """An answer of `/v1/score`."""

    model: Annotated[str, "NAME"]
    version: Annotated[str, "VERSION of the bundle that has scored"]
    scores: Annotated[dict[str, list[float]], "one number per candidate, by output"]


_OTHER = Annotated[Any, "ignored"]
InputParameters = TypedDict(
    "InputParameters",
    {
        "binary_data_size": NotRequired[
            Annotated[int, "of its data behind the JSON part", "bytes"]
        ],
        "<other>": _OTHER,
    },
)
InputParameters.__doc__ = "Parameters of an input."


class Input(TypedDict):
    """A tensor of a column."""

    name: Annotated[str, "of the column"]
    shape: Annotated[list[int], "`[n]`, of the context `[1]`, of lists `[n, length]`"]
    datatype: Annotated[Datatype, "of the data"]
    data: NotRequired[Annotated[list[Any], "values, unless they are binary"]]
    parameters: NotRequired[Annotated[InputParameters, "of binary data"]]


OutputParameters = TypedDict(
    "OutputParameters",
    {
        "binary_data": NotRequired[Annotated[bool, "the answer is binary"]],
        "<other>": _OTHER,
    },
)
OutputParameters.__doc__ = "Parameters of a requested output."


class RequestedOutput(TypedDict):
    """A requested output."""

    name: Annotated[str, "of the output"]
    parameters: NotRequired[Annotated[OutputParameters, "of the answer"]]


InferParameters = TypedDict(
    "InferParameters",
    {
        "binary_data_output": NotRequired[Annotated[bool, "all outputs are binary"]],
        "<other>": _OTHER,
    },
)
InferParameters.__doc__ = "Parameters of a request."


class InferRequest(TypedDict):
    """A request of `infer`."""

    id: NotRequired[Annotated[str | None, "is in the answer"]]
    inputs: Annotated[list[Input], "a tensor per column"]
    outputs: NotRequired[Annotated[list[RequestedOutput] | None, "all if absent"]]
    parameters: NotRequired[Annotated[InferParameters | None, "of the request"]]


class BinaryParameters(TypedDict):
    """Parameters of a binary output."""

    binary_data_size: Annotated[int, "of its data behind the JSON part", "bytes"]


class Output(TypedDict):
    """A tensor of an output."""

    name: Annotated[str, "of the output"]
    shape: Annotated[list[int], "`[n]`"]
    datatype: Annotated[Literal["FP64"], "of the data"]
    data: NotRequired[Annotated[list[float], "scores, unless they are binary"]]
    parameters: NotRequired[Annotated[BinaryParameters, "of binary data"]]


class Inferred(TypedDict):
    """An answer of `infer`."""

    model_name: Annotated[str, "NAME"]
    model_version: Annotated[str, "VERSION of the bundle that has scored"]
    id: NotRequired[Annotated[str, "of the request"]]
    outputs: Annotated[list[Output], "in the order of the request"]


class Loaded(TypedDict):
    """An answer of `load`. With status 409 it also has `error`."""

    name: Annotated[str, "NAME"]
    version: Annotated[str, "VERSION that is served now"]
    loaded: Annotated[bool, "it was loaded by this request"]
    error: NotRequired[Annotated[str, "why newer bundles were not loaded"]]


class Version(TypedDict):
    """A version in the repository."""

    name: Annotated[str, "NAME"]
    version: Annotated[str, "VERSION, empty if it could not be loaded"]
    state: Annotated[Literal["READY", "UNAVAILABLE"], "of the version"]
    reason: NotRequired[Annotated[str, "why it could not be loaded"]]


class Server(TypedDict):
    """The server."""

    name: Annotated[Literal["jaxrank"], "of the server"]
    version: Annotated[str, "of the package"]
    extensions: Annotated[list[str], "of the protocol"]


class ColumnParameters(TypedDict):
    """Parameters of a column."""

    source: Annotated[Literal["context", "candidate", "any"], "where it is given"]
    required: Annotated[bool, "its absence is an error"]


class Column(TypedDict):
    """A column of the model."""

    name: Annotated[str, "of the column"]
    datatype: Annotated[Datatype, "of its data"]
    shape: Annotated[list[int], "-1 for any number"]
    parameters: Annotated[ColumnParameters, "of jaxrank"]


class MeaningParameters(TypedDict):
    """Parameters of an output of the model."""

    meaning: Annotated[str, "what a score is"]


class ModelOutput(TypedDict):
    """An output of the model."""

    name: Annotated[str, "of the output"]
    datatype: Annotated[Literal["FP64"], "of its data"]
    shape: Annotated[list[int], "`[-1]`"]
    parameters: Annotated[MeaningParameters, "of jaxrank"]


class Metadata(TypedDict):
    """The model."""

    name: Annotated[str, "NAME"]
    versions: Annotated[list[str], "VERSION"]
    platform: Annotated[Literal["jaxrank_bundle"], "of the model"]
    inputs: Annotated[list[Column], "columns with their types"]
    outputs: Annotated[list[ModelOutput], "of the model"]


class ModelReady(TypedDict):
    """Whether a model is ready."""

    name: NotRequired[Annotated[str, "NAME, if it is ready"]]
    ready: Annotated[bool, "requests are answered"]


class Ready(TypedDict):
    """Whether the server is ready."""

    ready: Annotated[bool, "requests are answered"]


class Live(TypedDict):
    """Whether the server is live."""

    live: Annotated[bool, "the thread that scores runs"]


class Error(TypedDict):
    """An error."""

    error: Annotated[str, "what must hold and what was found"]
    field: NotRequired[Annotated[str, "of the request or of a setting"]]


class Route(NamedTuple):
    """A path and what it answers.

    request: record of its body. None: it has none.
    answer: record of its answer, or a list of them. None: text.
    """

    path: str
    method: str
    request: Any
    answer: Any
    meaning: str


_MODEL = "/v2/models/NAME"
_VERSION = f"{_MODEL}/versions/VERSION"
ROUTES = (
    Route("/v1/score", "POST", ScoreRequest, Scores, "scores"),
    Route(
        f"{_MODEL}/infer", "POST", InferRequest, Inferred, "the same by the Open Inference Protocol"
    ),
    Route(f"{_VERSION}/infer", "POST", InferRequest, Inferred, "of a version"),
    Route("/v2/repository/models/NAME/load", "POST", None, Loaded, "loads a newer bundle now"),
    Route("/v2/repository/index", "POST", None, list[Version], "loaded version, and failed ones"),
    Route("/v2", "GET", None, Server, "name and version of the server"),
    Route(_MODEL, "GET", None, Metadata, "columns with their types, and outputs"),
    Route(_VERSION, "GET", None, Metadata, "of a version"),
    Route(f"{_MODEL}/ready", "GET", None, ModelReady, "200 or 503"),
    Route(f"{_VERSION}/ready", "GET", None, ModelReady, "200 or 503"),
    Route("/v2/health/live", "GET", None, Live, "200 or 503"),
    Route("/v2/health/ready", "GET", None, Ready, "200 or 503"),
    Route("/metrics", "GET", None, None, "metrics for Prometheus"),
)

"""Lines of metrics.jsonl."""

from typing import Annotated, Literal, NotRequired, TypedDict

TrainStep = TypedDict(
    "TrainStep",
    {
        "step": Annotated[int, "steps done"],
        "kind": Annotated[Literal["train"], "of the line"],
        "seconds": Annotated[float, "of the programs of this run, without the time between", "s"],
        "loss": Annotated[float | None, "what is minimised"],
        "learning_rate": Annotated[float, "of the dense parameters"],
        "table_learning_rate": Annotated[float, "of the tables"],
        "gradient_norm": Annotated[float | None, "of the dense parameters"],
        "examples_per_second": NotRequired[
            Annotated[float, "on the last step of an execution", "examples/s"]
        ],
        "loss_spike": NotRequired[
            Annotated[float, "standard deviations above the running mean, of a spike"]
        ],
        "skipped": NotRequired[
            Annotated[int, '1 for a skipped step, with `watch.on_nonfinite="skip"`']
        ],
        "<task>/<metric>": Annotated[float | None, "a [metric](metrics.md) of the batch"],
        "<task>/weight": Annotated[float, 'learned, with `task_weighting="uncertainty"`'],
        "dropped/<feature>": Annotated[int, "lists that were cut"],
        "exchange/<stack>/rounds": Annotated[
            int, "of the exchange of a stack of tables, 1 unless a buffer was too small"
        ],
        "exchange/<stack>/unique_ids": Annotated[int, "that devices sent, each once per device"],
        "exchange/<stack>/buffer_use": Annotated[
            float, "these over the places in the buffers of all rounds"
        ],
        "exchange/<stack>/fullest_device": Annotated[
            float, "ids served by the fullest device, over the mean of the devices"
        ],
    },
)

ValidStep = TypedDict(
    "ValidStep",
    {
        "step": Annotated[int, "steps done"],
        "kind": Annotated[Literal["valid", "follow"], "`follow`: of `evaluate --follow`"],
        "day": NotRequired[Annotated[str, 'with `data.valid="next_day"`']],
        "seconds": Annotated[float, "as above", "s"],
        "<task>/<metric>": Annotated[float | None, "a [metric](metrics.md) of the data"],
    },
)

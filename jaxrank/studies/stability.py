"""The variation of training results between runs: synchronous against asynchronous."""

import dataclasses

from jaxrank.studies.study import Context, Outcome, Runs, RunSpec, Study, Table
from jaxrank.validate import field


@dataclasses.dataclass(frozen=True)
class Options:
    runs: int = field(20, help="runs of each kind", at_least=2)


def runs(context: Context) -> Runs:
    results = yield [RunSpec(f"seed-{i}", {"seed": i}) for i in range(context.options.runs)]
    names = sorted({name for result in results for name in result.metrics})
    rows = [(r.spec.name, *(r.metrics.get(name) for name in names)) for r in results]
    return Outcome(Table(("run", *names), rows))


STUDY = Study("stability", "deviation between runs, synchronous and asynchronous", Options, runs)

"""The records of each verb."""

from collections.abc import Mapping

from jaxrank.records import checks, files, runs

# What --json prints. Where a verb has several records, its flags decide.
VERBS: Mapping[str, tuple[type, ...]] = {
    "prepare": (files.Prepare,),
    "train": (runs.Train,),
    "evaluate": (runs.Evaluate, runs.Follow),
    "calibrate": (runs.Calibrate,),
    "explain": (runs.Explain,),
    "predict": (files.Predict, files.PredictBundle),
    "export": (files.Export, files.ExportFiles),
    "plan": (checks.Plan,),
    "compile": (checks.Compile,),
    "bench": (checks.Bench,),
    "study": (checks.Study,),
    "report": (files.Report,),
    "compare": (runs.Compare,),
    "compare-data": (checks.CompareData,),
    "selftest": (checks.Selftest,),
    "check-model": (checks.CheckModel,),
    "configs": (files.Configs,),
    "launch": (files.Launch,),
}

from jaxrank.config import default as default_config
from jaxrank.config_files import load as load_config
from jaxrank.data.prepare.passes import prepare as prepare_data
from jaxrank.errors import InputError as InputError
from jaxrank.errors import RunError as RunError
from jaxrank.evaluation.evaluate import evaluate as evaluate_run
from jaxrank.evaluation.evaluate import predict as predict_run
from jaxrank.export.bundle import export_bundle as export_bundle
from jaxrank.export.signature import Requests as Requests
from jaxrank.metrics.registry import register as register_metric
from jaxrank.models import Inputs as Inputs
from jaxrank.models import register as register_model
from jaxrank.task_losses import register as register_loss
from jaxrank.train import train as train_model
from jaxrank.validate import field as field

__version__: str
__all__ = [
    "InputError",
    "Inputs",
    "Requests",
    "RunError",
    "default_config",
    "evaluate_run",
    "export_bundle",
    "field",
    "load_config",
    "predict_run",
    "prepare_data",
    "register_loss",
    "register_metric",
    "register_model",
    "train_model",
]

from infinity._initialize import initialize as initialize
from infinity._version import __version__ as __version__
from infinity.config.schema import Config as Config
from infinity.config.schema import load_config as load_config
from infinity.engine import Engine as Engine
from infinity.errors import CheckpointError as CheckpointError
from infinity.errors import ConfigError as ConfigError
from infinity.errors import DoesNotFitError as DoesNotFitError
from infinity.errors import EngineClosedError as EngineClosedError
from infinity.errors import EngineFailedError as EngineFailedError
from infinity.errors import InfinityError as InfinityError
from infinity.errors import InfinityWarning as InfinityWarning
from infinity.errors import MachineError as MachineError
from infinity.errors import ResidencyError as ResidencyError
from infinity.errors import TrainingError as TrainingError
from infinity.errors import TransferError as TransferError
from infinity.integrations import deepspeed as deepspeed
from infinity.integrations.deepspeed.config import translate_deepspeed as translate_deepspeed
from infinity.integrations.deepspeed.door import as_deepspeed as as_deepspeed
from infinity.integrations.deepspeed.engine import DeepSpeedEngine as DeepSpeedEngine
from infinity.integrations.deepspeed.processes import add_config_arguments as add_config_arguments
from infinity.integrations.deepspeed.processes import init_distributed as init_distributed
from infinity.integrations.deepspeed.utils import OnDevice as OnDevice
from infinity.integrations.huggingface.models import from_config as from_config
from infinity.integrations.huggingface.models import from_pretrained as from_pretrained
from infinity.integrations.huggingface.save import save_pretrained as save_pretrained
from infinity.integrations.huggingface.settings import TrainingArguments as TrainingArguments
from infinity.integrations.huggingface.trainer import InfinityTrainer as InfinityTrainer
from infinity.model.meta_init import Init as Init
from infinity.optim.standalone import CPUAdam as CPUAdam
from infinity.optim.standalone import FusedAdam as FusedAdam
from infinity.profiling.step_report import StepReport as StepReport
from infinity.training.load_weights import load_weights as load_weights

__all__ = [
    "CPUAdam",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DoesNotFitError",
    "Engine",
    "EngineClosedError",
    "EngineFailedError",
    "FusedAdam",
    "InfinityError",
    "InfinityWarning",
    "Init",
    "MachineError",
    "ResidencyError",
    "StepReport",
    "TrainingError",
    "TransferError",
    "__version__",
    "as_deepspeed",
    "from_config",
    "from_pretrained",
    "initialize",
    "load_config",
    "load_weights",
    "save_pretrained",
]

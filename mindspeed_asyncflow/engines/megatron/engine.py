"""`MegatronTrainEngine`: one trainer rank.

    micro-batches -> feed (pad, cut over CP) -> megatron's schedule -> model -> log-probs -> loss sum -> gradient sums
    gradient sums -> optim (reduce, divide once, check, clip, step) -> weights -> export / checkpoint

A loss is always a *sum* over tokens. Gradients stay sums until `optim_step` divides them, so a result does not depend on
how samples were cut into micro-batches, calls, data-parallel or context-parallel ranks.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from mindspeed_asyncflow.config.parallel import check_parallel
from mindspeed_asyncflow.config.schema import TrainerConfig
from mindspeed_asyncflow.engines.megatron import checkpoint, collect, world
from mindspeed_asyncflow.engines.megatron.bootstrap import bootstrap
from mindspeed_asyncflow.engines.megatron.bridges import make_bridge
from mindspeed_asyncflow.engines.megatron.export import export_weights, plan_export
from mindspeed_asyncflow.engines.megatron.feed import RankBatch, make_rank_batches
from mindspeed_asyncflow.engines.megatron.optim import GradientStep, make_optimizer, wrap_data_parallel
from mindspeed_asyncflow.errors import DataError
from mindspeed_asyncflow.platforms.ports import HeldPort
from mindspeed_asyncflow.records import MicroBatch, OptimReport

LossFn = Callable[[torch.Tensor, torch.Tensor, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]

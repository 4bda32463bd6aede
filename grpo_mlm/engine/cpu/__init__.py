"""What megatron-core needs to run on a CPU with gloo. Installed by `engine/device.py`, imported by nobody else."""

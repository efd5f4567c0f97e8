"""Scripts that a test starts as processes of their own are not to be collected."""

collect_ignore = ["two_processes_lightning.py", "two_processes_accelerate.py", "two_processes_transformers.py"]

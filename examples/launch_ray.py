"""Starts `train` of launch_digits.py on two workers of a Ray cluster, and prints what they return.

    python examples/launch_ray.py                     # a cluster of this machine alone
    RAY_ADDRESS=auto python examples/launch_ray.py    # the cluster that `ray start` has made
"""

import ray
from horovod.ray import RayExecutor
from launch_digits import train

if __name__ == "__main__":
    ray.init(include_dashboard=False)
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=100), num_workers=2, cpus_per_worker=1)
    executor.start(extra_env_vars={"OMP_NUM_THREADS": "1"})
    try:
        print(*executor.run(train, kwargs={"epochs": 10}), sep="\n")
    finally:
        executor.shutdown()

"""Starts `train` of launch_digits.py on two processes from Python with `horovod.run`, and prints what they return.

    python examples/launch_run.py            # Horovod on MPI
    python examples/launch_run.py --gloo     # Horovod on Gloo
"""

import sys

import cloudpickle
import horovod
import launch_digits

if __name__ == "__main__":
    cloudpickle.register_pickle_by_value(launch_digits)  # the processes need not find the module
    gloo = "--gloo" in sys.argv
    results = horovod.run(launch_digits.train, kwargs={"epochs": 10}, num_proc=2, hosts="localhost:2",
                          use_gloo=gloo, use_mpi=not gloo)
    print(*results, sep="\n")

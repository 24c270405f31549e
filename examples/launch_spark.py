"""Starts `train` of launch_digits.py as two tasks of a Spark job, and prints what they return.

    python examples/launch_spark.py                                     # on this machine
    spark-submit --master spark://host:7077 examples/launch_spark.py    # on a cluster
"""

import cloudpickle
import horovod.spark
import launch_digits
from pyspark import SparkConf, SparkContext

if __name__ == "__main__":
    cloudpickle.register_pickle_by_value(launch_digits)  # the workers need not find the module
    with SparkContext(conf=SparkConf().setIfMissing("spark.master", "local[2]").setAppName("digits")):
        results = horovod.spark.run(launch_digits.train, kwargs={"epochs": 10}, num_proc=2, use_gloo=True)
    print(*results, sep="\n")

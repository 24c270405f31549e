"""`python -m horovod_oktopk advise`: what each scheme would cost on a network, and whether dense wins."""

from .measure import measure_memory, measure_network, measure_selection
from .model import ALONE, HIERARCHICAL, Host, Network, Prediction, host_sum_seconds, hosts_of, predict
from .report import report
from .units import parse_bandwidth, parse_latency, parse_memory_bandwidth

__all__ = ["ALONE", "HIERARCHICAL", "Host", "Network", "Prediction", "host_sum_seconds", "hosts_of",
           "measure_memory", "measure_network", "measure_selection", "parse_bandwidth", "parse_latency",
           "parse_memory_bandwidth", "predict", "report"]

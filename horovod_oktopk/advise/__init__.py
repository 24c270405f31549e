"""`python -m horovod_oktopk advise`: the cost of OkTopk and StepAhead on a network, against that of dense."""

from .measure import measure_network, measure_selection, parse_bandwidth, parse_latency
from .model import Network, Prediction, predict, predict_dense, report

__all__ = ["Network", "Prediction", "measure_network", "measure_selection", "parse_bandwidth", "parse_latency",
           "predict", "predict_dense", "report"]

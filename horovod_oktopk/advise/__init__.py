"""`python -m horovod_oktopk advise`: what OkTopk and StepAhead would cost on a network, and whether dense wins."""

from .measure import measure_network, measure_selection
from .model import Network, Prediction, predict, predict_dense
from .report import report
from .units import parse_bandwidth, parse_latency

__all__ = ["Network", "Prediction", "measure_network", "measure_selection", "parse_bandwidth", "parse_latency",
           "predict", "predict_dense", "report"]

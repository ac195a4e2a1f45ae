"""The metric of each GLUE task, for `evaluate.load`, without the network.

Sources: Wang et al. 2019, "GLUE", section 2, for which task is measured by what; the figures are those of scikit-learn
and SciPy. `evaluate` reads the imports of a metric script line by line, so there is one to a line.
"""

import datasets
import evaluate
import scipy.stats
import sklearn.metrics


def _accuracy(predictions, references):
    return {"accuracy": float(sklearn.metrics.accuracy_score(references, predictions))}


def _accuracy_and_f1(predictions, references):
    f1 = sklearn.metrics.f1_score(references, predictions)
    return _accuracy(predictions, references) | {"f1": float(f1)}


def _matthews(predictions, references):
    return {"matthews_correlation": float(sklearn.metrics.matthews_corrcoef(references, predictions))}


def _pearson_and_spearman(predictions, references):
    return {
        "pearson": float(scipy.stats.pearsonr(predictions, references).statistic),
        "spearmanr": float(scipy.stats.spearmanr(predictions, references).statistic),
    }


def _mse(predictions, references):
    return {"mse": float(sklearn.metrics.mean_squared_error(references, predictions))}


# `accuracy` and `mse` are for data sets that are no GLUE task.
METRICS = {
    "cola": _matthews,
    "sst2": _accuracy,
    "mrpc": _accuracy_and_f1,
    "stsb": _pearson_and_spearman,
    "qqp": _accuracy_and_f1,
    "mnli": _accuracy,
    "qnli": _accuracy,
    "rte": _accuracy,
    "wnli": _accuracy,
    "accuracy": _accuracy,
    "mse": _mse,
}
REGRESSION = ("stsb", "mse")


class GlueMetric(evaluate.Metric):
    """The metric of the GLUE task that is the configuration's name.

    `compute(predictions=, references=)` takes equally long sequences: label ids (int), or scores (float) for `stsb` and
    `mse`. It gives a dict of floats: `matthews_correlation` in [-1, 1] for cola; `accuracy` and `f1` of label 1 for
    mrpc and qqp; `pearson` and `spearmanr` in [-1, 1] for stsb, NaN where one side is constant; `mse` for mse;
    `accuracy` for the rest.

    Raises:
        KeyError: the configuration's name is not one of `METRICS`.
    """

    def _info(self):
        if self.config_name not in METRICS:
            raise KeyError(f"no metric is called {self.config_name!r}; there are: {', '.join(METRICS)}")
        value = datasets.Value("float64" if self.config_name in REGRESSION else "int64")
        return evaluate.MetricInfo(
            description="The metric of each GLUE task.",
            citation="",
            inputs_description="predictions and references: label ids, or scores for stsb and mse.",
            features=datasets.Features({"predictions": value, "references": value}),
        )

    def _compute(self, predictions, references):
        return METRICS[self.config_name](predictions, references)

"""What in a log is a metric."""

import re

NO_METRIC = re.compile(r"^(epoch|step|total_flos)$|_(runtime|per_second|samples|model_preparation_time)(_mm)?$")

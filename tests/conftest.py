"""Settings that hold for all tests."""

import torch
from hypothesis import settings

torch.set_num_threads(1)  # tiny models: threads would only wait for one another
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("repeatable")

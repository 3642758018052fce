"""The suite, and what it sets for itself and the processes that it starts.

Float32 is float32, also on chips that would multiply in fewer bits; MLX reads the variable once.
Source: `enable_tf32` in https://github.com/ml-explore/mlx/blob/main/mlx/utils.h

A process may open more files than the 256 that macOS allows at first.
"""

import os
import resource

FILES = 4096

os.environ["MLX_ENABLE_TF32"] = "0"

soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
if 0 <= soft < FILES and not 0 <= hard < FILES:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))

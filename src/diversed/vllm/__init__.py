"""A plug-in for vLLM: relaxed verification per request, with the verifiers of :mod:`diversed.verifiers`.

vLLM loads :func:`diversed.vllm.plugin.register` by itself in every process (entry point ``vllm.general_plugins``).
``python -m diversed.vllm doctor`` tells whether it is active. docs/serving-vllm.md is the manual.

Only ``plugin``, ``requests``, ``v1``, ``v2`` and ``cpu_kernels`` touch vLLM; the rest needs torch alone.
"""

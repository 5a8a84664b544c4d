"""Serves a bundle over HTTP: `jaxrank serve BUNDLE`, or `python -m jaxrank_serving.server BUNDLE`.

    settings      flags and limits
    serve         the process: socket, signals, uvicorn
    app           the ASGI application: routes, limits, health
    messages      reads request bodies and makes responses
    score         /v1/score: a context and its candidates
    inference     /v2: the Open Inference Protocol
    tensors       tensors of that protocol, in JSON and binary
    batcher       joins requests into batches in a thread of its own
    model         one loaded version
    repository    versions on disk: verifies and loads a newer one
    metrics       Prometheus metrics

docs/server.md of jaxrank describes the protocols and the operation.
"""

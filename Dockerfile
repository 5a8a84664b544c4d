# jaxrank for TPUs, or for NVIDIA GPUs: its wheels bring CUDA, so that the host needs only the driver.
#
#   docker build --build-arg ACCELERATOR=tpu --tag jaxrank:tpu .
#   docker build --build-arg ACCELERATOR=cuda --tag jaxrank:cuda .
#   docker run --rm --gpus=all --shm-size=1g jaxrank:cuda train --config=configs/quickstart.py ...
#
# And the server of exported models, on CPU and without JAX:
#
#   docker build --target server --tag jaxrank:server .
#   docker run --rm --publish=127.0.0.1:8080:8080 --volume=/models/ads:/models/ads:ro jaxrank:server /models/ads
FROM python:3.12-slim-bookworm AS server

ENV PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 1000 jaxrank
WORKDIR /opt/jaxrank
COPY constraints.txt ./
COPY serving serving
RUN pip install --no-cache-dir --constraint constraints.txt "./serving[server]"
USER 1000
EXPOSE 8080
# All addresses of the container. Which hosts reach them is up to --publish.
ENTRYPOINT ["jaxrank-serve", "--host=0.0.0.0"]

FROM python:3.12-slim-bookworm AS trainer

ARG ACCELERATOR=tpu
ENV PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# Process 1 gets no signal that it does not handle, and a program handles SIGTERM only while it trains.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends tini && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 jaxrank
WORKDIR /opt/jaxrank

# What jaxrank needs, in a layer that stays when only jaxrank changes.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY jaxrank/__init__.py jaxrank/
RUN mkdir configs launch && \
    pip install --no-cache-dir --constraint constraints.txt ".[${ACCELERATOR}]"

COPY jaxrank jaxrank
COPY configs configs
COPY launch launch
RUN pip install --no-cache-dir --no-deps --force-reinstall .

USER 1000
ENTRYPOINT ["tini", "--", "jaxrank"]

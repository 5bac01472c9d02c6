# A container that runs any verb, for `plimsoll gke`, `plimsoll slurm` --container, or by hand:
#
#     docker build --build-arg EXTRAS=tpu --tag plimsoll .        # EXTRAS: tpu, cuda, or nothing for CPU; see pyproject.toml
#     docker run plimsoll plimsoll configs list
#
# Nothing secret goes in: .dockerignore lets in what is named here, and credentials come from the environment at run time.
FROM python:3.11-slim-bookworm

ARG EXTRAS=""
# Where GKE's GPU nodes put the driver; nothing is there elsewhere.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64 \
    PYTHONUNBUFFERED=1

RUN useradd --create-home --uid 10001 plimsoll
WORKDIR /app
COPY LICENSE README.md constraints.txt pyproject.toml ./
COPY configs configs
COPY framework framework
COPY launch launch
COPY plimsoll plimsoll
RUN python -m pip install --no-cache-dir --constraint constraints.txt --editable ".${EXTRAS:+[$EXTRAS]}" \
    && mkdir runs \
    && chown plimsoll runs

USER 10001
CMD ["plimsoll"]

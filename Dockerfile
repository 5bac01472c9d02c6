# A container that runs any verb, for `plimsoll gke`, `plimsoll slurm` --container, or by hand:
#
#     docker build --build-arg EXTRAS=tpu --tag plimsoll .        # EXTRAS: tpu, cuda, or nothing for CPU; see pyproject.toml
#     docker run plimsoll plimsoll configs list
#
# Nothing secret goes in: .dockerignore lets in what is named here, and credentials come from the environment at run time.
# The digest is that of the tag's index of 2026-08-25 (all platforms), as docker-library/repo-info lists it in
# repos/python/remote/3.11-slim-bookworm.md. To update it: docker buildx imagetools inspect python:3.11-slim-bookworm
# One base serves all: the packages of the extras bring CUDA's libraries and libtpu.
FROM python:3.11-slim-bookworm@sha256:0bee7276f83efd4a1ee05bbbf4281d95ed28e079220a9457f25a93e3f1e3c31b

ARG EXTRAS=""
# Where GKE's GPU nodes put the driver; nothing is there elsewhere.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64 \
    PYTHONUNBUFFERED=1

RUN useradd --create-home --uid 10001 plimsoll
WORKDIR /app
COPY requirements requirements
RUN python -m pip install --no-cache-dir --require-hashes --requirement "requirements/${EXTRAS:-base}.txt"
COPY LICENSE README.md pyproject.toml ./
COPY configs configs
COPY framework framework
COPY launch launch
COPY plimsoll plimsoll
# Without dependencies and build isolation, so that nothing is downloaded here: the packages above have been checked.
RUN python -m pip install --no-cache-dir --no-deps --no-build-isolation --editable . \
    && mkdir runs \
    && chown plimsoll runs

USER 10001
CMD ["plimsoll"]

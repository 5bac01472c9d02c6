"""Local object stores: S3 from moto's server and GCS from gcp-storage-emulator, each on a free port of 127.0.0.1."""

import logging
import os
import socket
import uuid
import zlib

import pytest

_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "a-secret-that-must-not-be-shown",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    # Otherwise gcsfs would query the bucket type over gRPC, which the emulator does not support.
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING": "testing",
}


@pytest.fixture(scope="session")
def _s3_server():
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs a line per request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="session")
def _gcs_server():
    from gcp_storage_emulator.server import Response, create_server

    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)  # it logs a line per missing object
    write_file = Response.write_file

    def with_generation(self, content, *args, **kwargs):
        self["x-goog-generation"] = str(1 + zlib.crc32(content))  # like GCS; tensorstore needs it
        return write_file(self, content, *args, **kwargs)

    Response.write_file = with_generation
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket="plimsoll")
    server.start()
    yield f"http://127.0.0.1:{port}"
    server.stop()
    Response.write_file = write_file


@pytest.fixture
def environment(monkeypatch):
    for name, value in _ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.fixture
def s3(environment, _s3_server):
    """The URL of a new S3 bucket."""
    import fsspec

    environment.setenv("AWS_ENDPOINT_URL", _s3_server)
    bucket = f"b{uuid.uuid4().hex[:12]}"
    fsspec.filesystem("s3", use_listings_cache=False).mkdir(bucket)
    return f"s3://{bucket}"


@pytest.fixture
def gcs(environment, _gcs_server):
    """An empty URL in the GCS emulator's bucket."""
    environment.setenv("STORAGE_EMULATOR_HOST", _gcs_server)
    environment.setenv("TENSORSTORE_GCS_HTTP_URL", _gcs_server)
    return f"gs://plimsoll/{uuid.uuid4().hex[:12]}"


@pytest.fixture(params=["s3", "gcs"])
def store(request):
    """The URL of each of the two stores, one after the other."""
    return request.getfixturevalue(request.param)

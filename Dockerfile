FROM python:3.12-slim

ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/ebbtide ebbtide

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY router router
RUN pip install -c constraints.txt . && rm -rf /src

USER ebbtide
WORKDIR /var/lib/ebbtide
EXPOSE 8080

HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ.get('EBBTIDE_SERVER__PORT', '8080') + '/healthz', timeout=2)"]

# Settings are mounted at /etc/ebbtide/ebbtide.yaml. To be reached from outside the container they need keys.
ENTRYPOINT ["ebbtide"]
CMD ["serve", "--config", "/etc/ebbtide/ebbtide.yaml", "--host", "0.0.0.0"]

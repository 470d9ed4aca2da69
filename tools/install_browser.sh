#!/usr/bin/env bash
# A Chromium for the tests of the report page: the one that is there, else playwright's own, else
# (as root, on Debian and its kin) the distribution's. Where none can be had, the tests that need
# it are skipped and say so.
#
#     tools/install_browser.sh PYTHON     with the Python that has playwright
set -u
python=$1

for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then
        exit 0
    fi
done
if timeout 300 "$python" -m playwright install chromium >/dev/null 2>&1; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq
    if DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium; then
        exit 0
    fi
fi
echo "no Chromium could be installed: the tests of the report page will be skipped" >&2

#!/bin/sh
# Install the headless browser that the tests of the page need, where this is root's own Debian; otherwise say what is
# missing. Never fails and takes four minutes at most: without a browser those tests are skipped, and say so.
for name in chromium-headless-shell chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null; then exit 0; fi
done
without() {
  echo "no browser: $1; the tests of the page in a browser will be skipped" >&2
  exit 0
}
[ "$(uname -s)" = Linux ] && command -v apt-get >/dev/null || without "this is no Debian"
[ "$(id -u)" = 0 ] || without "not root (as root: apt-get install chromium-headless-shell)"
# Ubuntu's package of that name is a stub that wants snapd, which containers lack.
grep -q '^ID=debian' /etc/os-release 2>/dev/null || without "only Debian has one to install"

export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
apt() {
  timeout "$1" apt-get -q -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=30 "$2" \
    -y --no-install-recommends $3 >>"$log" 2>&1
}
echo "installing chromium-headless-shell for the tests of the page" >&2
apt 60 update || true
apt 120 install chromium-headless-shell || apt 60 install chromium || { tail -n 3 "$log" >&2; rm "$log"; without "apt-get failed"; }
rm "$log"

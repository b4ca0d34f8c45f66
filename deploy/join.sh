#!/bin/sh
# Adds each named site that has no token yet. Each token is in its own folder, so that no worker can read another's.
# Runs beside the coordinator, in whose folder the first admin token is.
set -eu
umask 077
tokens=${TOKENS:-/tokens}
for site in "$@"; do
  mkdir -p "$tokens/$site"
  [ -s "$tokens/$site/token" ] ||
    tessera admin --token-file "$tokens/admin/token" site add "$site" --token-file "$tokens/$site/token" >/dev/null
done

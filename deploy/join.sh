#!/bin/sh
# Adds each site that is named, unless it has a token already, each in a folder of its own: no worker is to see
# another's. Runs beside the coordinator, whose first admin token lies there too.
set -eu
umask 077
tokens=${TOKENS:-/tokens}
for site in "$@"; do
  mkdir -p "$tokens/$site"
  [ -s "$tokens/$site/token" ] ||
    tessera admin --token-file "$tokens/admin/token" site add "$site" --token-file "$tokens/$site/token" >/dev/null
done

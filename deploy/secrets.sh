#!/bin/sh
# Creates the passwords for deploy/compose.yaml, in files that only their owner can read, and the data folders.
# Running it again keeps existing files: `sh deploy/secrets.sh`
set -eu
umask 077
cd "$(dirname "$0")"
mkdir -p secrets data/database data/coordinator/staging data/tokens/admin data/tokens/north data/tokens/south data/tokens/west data/keys/north data/keys/south data/keys/west data/north data/south data/west

new() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
made() { [ -s "secrets/$1" ] || { cat > "secrets/$1.part" && mv "secrets/$1.part" "secrets/$1"; }; }

new | made database-password
password=$(cat secrets/database-password)
echo "postgresql://tessera:$password@database/tessera" | made database-url

# Containers run as the owner of these files, so that they can read them, and the owner can read the containers' files.
user=$(id -u):$(id -g)
if [ "$(id -u)" = 0 ]; then
  user=10001:10001
  chown -R "$user" secrets data
fi
echo "TESSERA_USER=$user" > .env

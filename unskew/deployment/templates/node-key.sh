#!/bin/sh
# Makes a site's node key, best at the site itself. Usage: sh node-key.sh FOLDER
# FOLDER/node.key stays at the site; FOLDER/node.pub goes to whoever registers the site at the SuperLink.
set -eu
umask 077
[ $# -eq 1 ] || { echo "usage: sh node-key.sh FOLDER" >&2; exit 2; }
mkdir -p "$1"
[ ! -e "$1/node.key" ] || { echo "$1/node.key is already there" >&2; exit 1; }
ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f "$1/node.key"
mv "$1/node.key.pub" "$1/node.pub"
chmod 600 "$1/node.key"
chmod 644 "$1/node.pub"

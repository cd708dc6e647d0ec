#!/bin/sh
# Creates a site's two key pairs, preferably at the site itself. Usage: sh node-key.sh FOLDER
# node.key and signing.key stay at the site. Send node.pub to the administrator who registers the site at the SuperLink. Send
# signing.pub to the operators of all other sites, not through the server; it becomes a line of every roster.txt.
set -eu
umask 077
[ $# -eq 1 ] || { echo "usage: sh node-key.sh FOLDER" >&2; exit 2; }
mkdir -p "$1"
for name in node signing; do
  [ ! -e "$1/$name.key" ] || { echo "$1/$name.key already exists" >&2; exit 1; }
done
for name in node signing; do
  ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f "$1/$name.key"
  mv "$1/$name.key.pub" "$1/$name.pub"
  chmod 600 "$1/$name.key"
  chmod 644 "$1/$name.pub"
done

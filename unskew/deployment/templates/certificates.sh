#!/bin/sh
# Creates a private CA and the SuperLink's certificate. Usage: sh certificates.sh HOST [HOST...]
# A HOST is a name or an IPv4 address under which sites reach the SuperLink. Run the script again to renew the certificate; the
# CA is not replaced. Keep ca/ca.key off the network. DAYS sets the validity of the certificate.
set -eu
umask 077
cd "$(dirname "$0")"
[ $# -gt 0 ] || { echo "usage: sh certificates.sh HOST [HOST...]" >&2; exit 2; }
mkdir -p ca superlink
names=""
for host in "$@"; do
  case "$host" in
    *[!0-9.]*) kind=DNS ;;
    *) kind=IP ;;
  esac
  names="${names:+$names,}$kind:$host"
done
if [ ! -f ca/ca.key ]; then
  openssl ecparam -name secp384r1 -genkey -noout -out ca/ca.key
  openssl req -x509 -new -key ca/ca.key -sha384 -days 3650 -subj "/CN=unskew deployment CA" \
    -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign,cRLSign" -out ca/ca.crt
fi
openssl ecparam -name secp384r1 -genkey -noout -out superlink/server.key
openssl req -new -key superlink/server.key -subj "/CN=unskew SuperLink" -out superlink/server.csr
printf 'subjectAltName=%s\nbasicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\nextendedKeyUsage=serverAuth\n' \
  "$names" > superlink/server.ext
openssl x509 -req -in superlink/server.csr -CA ca/ca.crt -CAkey ca/ca.key -CAcreateserial -sha384 -days "${DAYS:-365}" \
  -extfile superlink/server.ext -out superlink/server.crt 2> superlink/signing.log || { cat superlink/signing.log >&2; exit 1; }
rm superlink/server.csr superlink/server.ext superlink/signing.log
cp ca/ca.crt superlink/ca.crt
chmod 644 ca/ca.crt superlink/ca.crt superlink/server.crt
echo "Send ca/ca.crt to every site; copy superlink/ to the SuperLink; keep ca/ca.key private and offline."

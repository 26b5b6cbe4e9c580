#!/usr/bin/env bash
# Prints a Secret with a new certificate authority, and one certificate and key for the cluster.
#   ./certificates.sh | kubectl apply -f -
set -euo pipefail

name=${1:-dask-tls}
days=${2:-365}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

openssl req -x509 -newkey rsa:3072 -nodes -days "$days" -subj "/CN=$name authority" \
  -keyout "$folder/ca.key" -out "$folder/ca.crt" 2>/dev/null
openssl req -newkey rsa:3072 -nodes -subj "/CN=$name" \
  -keyout "$folder/tls.key" -out "$folder/tls.csr" 2>/dev/null
openssl x509 -req -days "$days" -in "$folder/tls.csr" -out "$folder/tls.crt" \
  -CA "$folder/ca.crt" -CAkey "$folder/ca.key" -CAcreateserial 2>/dev/null

cat <<SECRET
apiVersion: v1
kind: Secret
metadata:
  name: $name
type: Opaque
data:
  ca.crt: $(base64 -w0 "$folder/ca.crt")
  tls.crt: $(base64 -w0 "$folder/tls.crt")
  tls.key: $(base64 -w0 "$folder/tls.key")
SECRET

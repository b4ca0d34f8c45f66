{{- define "tessera.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels that select: of the release, and of one part of it. */}}
{{- define "tessera.selector" -}}
app.kubernetes.io/name: tessera
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tessera.labels" -}}
{{ include "tessera.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "tessera.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* What pods of the profile `restricted` must say of themselves. */}}
{{- define "tessera.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- end -}}

{{- define "tessera.container" -}}
image: {{ include "tessera.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
env:
  - {name: TESSERA_DATABASE_URL_FILE, value: {{ printf "/run/secrets/database/%s" .Values.database.key | quote }}}
  {{- if .Values.store.existingSecret }}
  - {name: AWS_ACCESS_KEY_ID_FILE, value: /run/secrets/store/access-key}
  - {name: AWS_SECRET_ACCESS_KEY_FILE, value: /run/secrets/store/secret-key}
  {{- end }}
  - {name: TESSERA_BLOB_URL, value: {{ required "store.url: where blobs are, s3://bucket/prefix" .Values.store.url | quote }}}
  - {name: AWS_REGION, value: {{ .Values.store.region | quote }}}
  {{- with .Values.store.endpoint }}
  - {name: AWS_ENDPOINT_URL, value: {{ . | quote }}}
  {{- end }}
  {{- if .Values.store.allowHttp }}
  - {name: AWS_ALLOW_HTTP, value: "true"}
  {{- end }}
  - {name: TESSERA_STAGING_DIR, value: /data/staging}
  # The ingress or gateway terminates TLS.
  - {name: TESSERA_BEHIND_PROXY, value: "true"}
  {{- with .Values.forwardedAllowIps }}
  - {name: FORWARDED_ALLOW_IPS, value: {{ . | quote }}}
  {{- end }}
  - {name: TESSERA_HEARTBEAT_FILE, value: /tmp/alive}
  - {name: TESSERA_ADMIN_TOKEN_FILE, value: /tmp/admin-token}
  {{- if .Values.oidcClientSecret }}
  - {name: TESSERA_OIDC_CLIENT_SECRET_FILE, value: /run/secrets/oidc/client-secret}
  {{- end }}
  {{- range $name, $value := .Values.settings }}
  - {name: TESSERA_{{ $name }}, value: {{ $value | quote }}}
  {{- end }}
  {{- range $name, $value := .Values.otel }}
  - {name: OTEL_{{ $name | trimPrefix "OTEL_" }}, value: {{ $value | quote }}}
  {{- end }}
volumeMounts:
  - {name: data, mountPath: /data}
  - {name: scratch, mountPath: /tmp}
  - {name: database, mountPath: /run/secrets/database, readOnly: true}
  {{- if .Values.store.existingSecret }}
  - {name: store, mountPath: /run/secrets/store, readOnly: true}
  {{- end }}
  {{- if .Values.oidcClientSecret }}
  - {name: oidc, mountPath: /run/secrets/oidc, readOnly: true}
  {{- end }}
{{- end -}}

{{- define "tessera.volumes" -}}
- name: data
  {{- if .Values.staging.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.staging.existingClaim | quote }}}
  {{- else }}
  # An emptyDir would report the node's disk as its own, and the kubelet would evict a pod that fills its limit.
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        {{- with .Values.staging.storageClass }}
        storageClassName: {{ . | quote }}
        {{- end }}
        resources:
          requests: {storage: {{ .Values.staging.size | quote }}}
  {{- end }}
- name: scratch
  emptyDir: {sizeLimit: 1Gi}
{{ include "tessera.secrets" . }}
{{- end -}}

{{- define "tessera.secrets" -}}
- name: database
  secret: {secretName: {{ required "database.existingSecret: the secret that holds the database URL" .Values.database.existingSecret | quote }}}
{{- with .Values.store.existingSecret }}
- name: store
  secret: {secretName: {{ . | quote }}}
{{- end }}
{{- with .Values.oidcClientSecret }}
- name: oidc
  secret: {secretName: {{ . | quote }}}
{{- end }}
{{- end -}}

{{- define "tessera.alive" -}}
exec:
  command: [python, -c, "import os, sys, time; sys.exit(time.time() - os.stat('/tmp/alive').st_mtime > 60)"]
{{- end -}}

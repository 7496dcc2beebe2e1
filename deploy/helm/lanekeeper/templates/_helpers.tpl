{{- define "lanekeeper.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "lanekeeper.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "lanekeeper.labels" -}}
{{ include "lanekeeper.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "lanekeeper.secret" -}}
{{- if .Values.existingSecret }}{{ .Values.existingSecret }}{{ else }}
{{- if not (and .Values.secrets.DATABASE_URL .Values.secrets.AGENT_ADMIN_TOKEN) }}
{{- fail "set existingSecret to the name of a Secret with DATABASE_URL and AGENT_ADMIN_TOKEN, or set secrets.DATABASE_URL and secrets.AGENT_ADMIN_TOKEN" }}
{{- end }}{{ include "lanekeeper.name" . }}{{ end }}
{{- end }}

{{- define "lanekeeper.locked" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

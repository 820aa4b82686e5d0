{{- define "headrace.name" -}}
{{- printf "%s-%s" .Release.Name "headrace" | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "headrace.labels" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "headrace.image" -}}
{{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) }}
{{- end }}

{{- define "headrace.secretName" -}}
{{ .Values.existingSecret | default (include "headrace.name" .) }}
{{- end }}

{{- define "headrace.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "headrace.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "headrace.mounts" -}}
- {name: secret, mountPath: /etc/headrace, readOnly: true}
- {name: scratch, mountPath: /tmp}
- {name: cache, mountPath: /cache}
{{- if .Values.modelVolume }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- define "headrace.volumes" -}}
- name: secret
  secret: {secretName: {{ include "headrace.secretName" . }}, defaultMode: 0440}
- name: scratch
  emptyDir: {}
- name: cache
  emptyDir: {}
{{- with .Values.modelVolume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

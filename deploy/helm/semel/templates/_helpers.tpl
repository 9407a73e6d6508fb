{{- define "semel.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "semel.frontend" -}}{{ include "semel.name" . }}-frontend{{- end -}}

{{/* The name of a group's objects: of (dict "root" $ "group" group). */}}
{{- define "semel.worker" -}}{{ include "semel.name" .root }}-worker-{{ .group.name }}{{- end -}}

{{/* What never changes of a pod: of (dict "root" $ "component" "frontend"). */}}
{{- define "semel.selector" -}}
app.kubernetes.io/name: semel
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "semel.workerSelector" -}}
{{ include "semel.selector" (dict "root" .root "component" "worker") }}
semel.dev/group: {{ .group.name | quote }}
{{- end -}}

{{- define "semel.labels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{/* A pod has this long to end by itself: what it takes, and some seconds for its processes. */}}
{{- define "semel.graceSeconds" -}}
{{- addf .drainDelaySeconds .drainSeconds 15 | ceil | int -}}
{{- end -}}

{{- define "semel.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.userId }}
runAsGroup: {{ .Values.podSecurity.userId }}
fsGroup: {{ .Values.podSecurity.userId }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "semel.securityContext" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* A Secret as a file that its group may read, which is how semel takes it: of (dict "name" … "secret" …). */}}
{{- define "semel.secretVolume" -}}
- name: {{ .name }}
  secret:
    secretName: {{ .secret.name }}
    defaultMode: 0440
    items: [{key: {{ .secret.key | quote }}, path: key}]
{{- end -}}

{{/* All of a Secret as files in a folder, so pods see new ones without a restart: of (dict "name" … "secret" NAME). */}}
{{- define "semel.keysVolume" -}}
- name: {{ .name }}
  secret:
    secretName: {{ .secret }}
    defaultMode: 0440
{{- end -}}

{{- define "semel.image" -}}
{{ .image.repository }}{{ if eq (.image.variant | default "full") "slim" }}-slim{{ end }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}

{{/* Whether KEDA scales a group, and its Deployment has no number of its own: of (dict "root" $ "group" group). */}}
{{- define "semel.isScaled" -}}
{{- if and .root.Values.worker.autoscaling.enabled .group.maxReplicas }}true{{ end -}}
{{- end -}}

{{/* A rule of egress to the ports of these addresses: of (dict "addresses" … "peers" …). */}}
{{- define "semel.egressTo" -}}
{{- $ports := list -}}
{{- range .addresses }}{{ $ports = append $ports (regexFind "[0-9]+$" (urlParse .).host) }}{{ end -}}
- ports:
    {{- range uniq $ports }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
  {{- with .peers }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- define "semel.dnsEgress" -}}
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
{{- end -}}

{{/* Every public address, and no private one: neither pods nor a cloud's metadata. */}}
{{- define "semel.publicPeers" -}}
- ipBlock: {cidr: 0.0.0.0/0, except: [10.0.0.0/8, 100.64.0.0/10, 127.0.0.0/8, 169.254.0.0/16, 172.16.0.0/12, 192.168.0.0/16]}
- ipBlock: {cidr: "::/0", except: ["::1/128", "fc00::/7", "fe80::/10"]}
{{- end -}}

{{- define "semel.probes" -}}
startupProbe:
  httpGet: {path: /health, port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ .startupFailures }}
readinessProbe:
  httpGet: {path: /ready, port: {{ .port }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
livenessProbe: # never /ready: without workers frontends wait, and do not restart
  httpGet: {path: /health, port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
{{- end -}}

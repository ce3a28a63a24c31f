{{/* One process of the mesh, of a dict with: root, role, part (its name in the release), image, port (of gRPC; metrics
are one above), settings (args, env and resources of the role), args, startupSeconds, and maybe gpus, mounts, volumes. */}}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
penstock.io/role: {{ .role }}
{{- end }}

{{- define "penstock.pod" -}}
metadata:
  labels:
    {{- include "penstock.labels" . | nindent 4 }}
  annotations:
    prometheus.io/scrape: "true"
    prometheus.io/port: {{ add1 .port | quote }}
    prometheus.io/path: /metrics
spec:
  # Variables of services would read as options: PENSTOCK_... is Penstock's own.
  enableServiceLinks: false
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ add .root.Values.drainSeconds 10 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .settings.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .settings.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .role }}
      image: {{ .image | quote }}
      imagePullPolicy: {{ .root.Values.images.pullPolicy }}
      args:
        - serve
        - {{ .role }}
        - --member-id=$(POD_NAME)
        - --bind-host=0.0.0.0
        - --port={{ .port }}
        - --metrics-port={{ add1 .port }}
        - --drain-s={{ .root.Values.drainSeconds }}
        {{- range concat .args (default list .settings.args) }}
        - {{ . | quote }}
        {{- end }}
      env:
        - name: PENSTOCK_STORE
          value: {{ .root.Values.store | quote }}
        - name: POD_NAME
          valueFrom:
            fieldRef:
              fieldPath: metadata.name
        {{- with .settings.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - name: grpc
          containerPort: {{ .port }}
        - name: metrics
          containerPort: {{ add1 .port }}
        {{- if eq .role "frontend" }}
        - name: http
          containerPort: 8000
        {{- end }}
      startupProbe:
        grpc:
          port: {{ .port }}
        periodSeconds: 5
        failureThreshold: {{ div .startupSeconds 5 }}
      readinessProbe:
        grpc:
          port: {{ .port }}
        periodSeconds: 5
      # Not by health: an instance that drains is not serving, and must live until its requests have ended.
      livenessProbe:
        tcpSocket:
          port: grpc
        periodSeconds: 10
        failureThreshold: 6
      {{- $limits := dict }}
      {{- if .gpus }}
      {{- $limits = dict "limits" (dict "nvidia.com/gpu" .gpus) }}
      {{- end }}
      {{- with merge $limits (deepCopy (default dict .settings.resources)) }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .mounts }}
      volumeMounts:
        {{- toYaml . | nindent 8 }}
      {{- end }}
  {{- with .volumes }}
  volumes:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* A read-only folder of a claim, as a mount and a volume, of a dict with: name, claim. */}}
{{- define "penstock.mount" -}}
{{ dict "name" .name "mountPath" (printf "/%s" .name) "readOnly" true | list | toJson }}
{{- end }}
{{- define "penstock.volume" -}}
{{ dict "name" .name "persistentVolumeClaim" (dict "claimName" .claim "readOnly" true) | list | toJson }}
{{- end }}

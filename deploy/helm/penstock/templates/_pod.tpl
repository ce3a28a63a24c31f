{{/* One process of the mesh, of a dict with: root, role, part (its name in the release), image, port (of gRPC; metrics
are one above), settings (args, env and resources of the role), args, startupSeconds, and maybe gpus, mounts, volumes, serviceAccount (that it asks the cluster's API as), readiness (the name of the health that says whether it is ready). */}}

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
  automountServiceAccountToken: {{ hasKey . "serviceAccount" }}
  {{- with .serviceAccount }}
  serviceAccountName: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ add .root.Values.drainSeconds 10 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    fsGroup: 10001
    seccompProfile:
      type: RuntimeDefault
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
  {{- with .settings.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .settings.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    - {{- toYaml (merge (dict "labelSelector" (dict "matchLabels" (include "penstock.selector" $ | fromYaml))) .) | nindent 6 }}
    {{- end }}
  {{- end }}
  {{- with .settings.priorityClassName }}
  priorityClassName: {{ . }}
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
        {{- if not .root.Values.identity.source }}
        - --insecure
        {{- end }}
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
        {{- if .root.Values.identity.source }}
        - name: PENSTOCK_IDENTITY
          value: /identity
        {{- end }}
        {{- with .settings.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - name: grpc
          containerPort: {{ .port }}
          protocol: TCP
        - name: metrics
          containerPort: {{ add1 .port }}
          protocol: TCP
        {{- if eq .role "frontend" }}
        - name: http
          containerPort: 8000
          protocol: TCP
        {{- end }}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities:
          drop: [ALL]
      # Over HTTP: the kubelet's gRPC probe has no identity to show, and clusters before 1.24 have none.
      startupProbe:
        httpGet:
          path: /ready
          port: metrics
        periodSeconds: 5
        failureThreshold: {{ div .startupSeconds 5 }}
      readinessProbe:
        httpGet:
          path: /ready{{ with .readiness }}/{{ . }}{{ end }}
          port: metrics
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
      {{- /* Numbers as text: up to Kubernetes 1.20, server-side apply takes no others. */}}
      {{- range $amounts := list .requests .limits }}
      {{- range $name, $amount := $amounts }}
      {{- $_ := set $amounts $name (toString $amount) }}
      {{- end }}
      {{- end }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with concat (default list .mounts) (include "penstock.identityMount" .root | fromJsonArray) }}
      volumeMounts:
        {{- toYaml . | nindent 8 }}
      {{- end }}
  {{- with concat (default list .volumes) (include "penstock.identityVolume" . | fromJsonArray) }}
  volumes:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* The identity of a role, as mounts (of the root) and volumes (of a dict with: root, role); none without `identity.source`. */}}
{{- define "penstock.identityMount" -}}
{{ .Values.identity.source | empty | ternary list (list (dict "name" "identity" "mountPath" "/identity" "readOnly" true)) | toJson }}
{{- end }}
{{- define "penstock.identityVolume" -}}
{{- $secret := dict "secretName" (printf "%s-identity-%s" .root.Release.Name .role) "defaultMode" 288 }}
{{- .root.Values.identity.source | empty | ternary list (list (dict "name" "identity" "secret" $secret)) | toJson }}
{{- end }}

{{/* A read-only folder of a claim, as a mount and a volume, of a dict with: name, claim. */}}
{{- define "penstock.mount" -}}
{{ dict "name" .name "mountPath" (printf "/%s" .name) "readOnly" true | list | toJson }}
{{- end }}
{{- define "penstock.volume" -}}
{{ dict "name" .name "persistentVolumeClaim" (dict "claimName" .claim "readOnly" true) | list | toJson }}
{{- end }}

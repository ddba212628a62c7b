from infinity.integrations.huggingface import models as models
